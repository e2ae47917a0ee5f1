"""`SparseLoCo`: `DiLoCo` without outer momentum, of which `ChunkTopK` sends the changes.

With x_i the parameters of rank i of p, e_i what it has not sent yet, and z the outer parameters, which all
ranks have alike (Sarfi et al. 2025), every `sync_every` steps

    e_i <- error_decay e_i + z - x_i
    d_i <- the `keep` largest of each chunk of e_i, in `bits` bits
    e_i <- e_i - d_i
    z   <- z - lr (d_1 + ... + d_p) / p
    x_i <- z
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpisgd.arguments import check_positive
from mpisgd.methods.chunk_top_k.chunk_top_k import ChunkTopK, check_chunks
from mpisgd.methods.diloco.diloco import DiLoCo
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.sparse_loco import paper
from mpisgd.methods.strategy.goes_with import Compressions, GoesWith, needs_default, yes
from mpisgd.methods.strategy.local_training import LocalSynchronizer
from mpisgd.methods.strategy.strategy import Strategy
from mpisgd.methods.strategy.training import Training

__all__ = ["SparseLoCo"]


@dataclass(frozen=True)
class SparseLoCo(Strategy):
    """Ranks train independently; every `sync_every` steps a small part of their changes is averaged.

    The wrapped optimizer is the inner one, with separate state on each rank, usually AdamW; Muon works, too.
    Each rank adds what it has not sent, times `error_decay`, to its next changes; this takes the place of an
    outer momentum. The strategy is short for

        strategy=mpisgd.DiLoCo(sync_every, outer_options={"lr": lr}),
        compression=mpisgd.compress.ChunkTopK(keep, chunk, bits, error_decay)

    and each of both forms loads what the other has saved. Use the long form for fragments, overlap, or
    another outer optimizer. `mpisgd.compress.ChunkTopK` lists the differences from the paper.

    Args:
        sync_every: steps from one outer step to the next: H of the paper, 15 to 250 there.
        keep: number of elements that are sent of each chunk; with the default chunk 1 to 3 % are 41 to 123.
        chunk: number of consecutive elements of a parameter among which the largest are chosen, 1 to 65536.
        bits: number of bits for each element that is sent, including its sign; 2 to 8.
        error_decay: share of what was not sent that is added to the next changes, 0 to 1: beta of the paper.
        lr: learning rate of the outer step: alpha of the paper.

    Module buffers (`named_buffers`) are averaged in each outer step, and never compressed.

    Cost: every `sync_every` steps what `ChunkTopK` costs, and an outer step. Each rank keeps two tensors of
        the size of the parameters: the outer parameters, the same on all ranks, and what it has not sent.
    """

    sync_every: int = 30
    keep: int = 64
    chunk: int = 4096
    bits: int = 2
    error_decay: float = 0.95
    lr: float = 1.0

    @classmethod
    def examples(cls) -> Sequence["SparseLoCo"]:
        """See `Strategy`."""
        return (cls(2), cls(3, keep=2, chunk=5, bits=4, error_decay=0.5, lr=0.75))

    def __post_init__(self) -> None:
        check_positive("SparseLoCo", "sync_every", self.sync_every, whole=True)
        check_positive("SparseLoCo", "lr", self.lr)
        check_chunks("SparseLoCo", self.keep, self.chunk, self.bits, self.error_decay)

    @property
    def own_compression(self) -> ChunkTopK:
        """See `Strategy`."""
        return ChunkTopK(self.keep, self.chunk, self.bits, self.error_decay)

    @property
    def outer(self) -> DiLoCo:
        """The outer steps: `DiLoCo` with the same period and learning rate, without compression."""
        return DiLoCo(self.sync_every, outer_options={"lr": self.lr})

    @property
    def goes_with(self) -> GoesWith:
        """The options of `DiLoCo`, but no other compression than its own; see `GoesWith`."""
        return replace(
            self.outer.goes_with,
            compression=Compressions("its own", (needs_default,)),
            elastic=yes("survivors go on from their own models, with what they have left out"),
        )

    def synchronizer(self, training: Training) -> LocalSynchronizer:
        """Return the working part, which is that of `DiLoCo` with `own_compression`."""
        options = training.options._replace(compression=self.own_compression)
        return self.outer.synchronizer(training._replace(options=options))

    def paper(self, size: int, lengths: Sequence[tuple[str, int]] = ()) -> Paper[Any]:
        """See `Strategy`."""
        return paper.SparseLoCo(
            H=self.sync_every,
            alpha=float(self.lr),
            beta=float(self.error_decay),
            keep=self.keep,
            chunk=self.chunk,
            L=(1 << (self.bits - 1)) - 1,
        )
