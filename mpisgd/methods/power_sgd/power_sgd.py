"""`PowerSGD`: gradients are sent as the product of two narrow matrices.

Vogels, Karimireddy and Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import cut_by
from mpisgd.arguments import check_count, check_flag, check_positive, check_seed
from mpisgd.compress.compressor import BucketLayout, BucketReducer
from mpisgd.compress.randomness import generator
from mpisgd.compress.residual import Waiting, is_finite, memory_of
from mpisgd.compress.sum_reducer import SumReducer
from mpisgd.compress.wide_compressor import WideCompressor
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.method_state import alike
from mpisgd.methods.coding import Coding
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.power_sgd import paper

__all__ = ["PowerSGD", "PowerSGDReducer", "orthogonalize"]


@dataclass(frozen=True)
class PowerSGD(WideCompressor):
    """Sends a low-rank approximation of each matrix of gradients, found by a power iteration.

    A parameter is a matrix [n, m]: its first dimension, and all others together. In each step

        M_i = G_i + E_i                        gradient and residual of rank i
        P   = mean of M_i Q over the ranks     [n, r], with Q [m, r] of the step before (warm start)
        P   = orthonormal basis of P           by a QR decomposition
        Q   = mean of M_i^T P over the ranks
        G   = P Q^T                            the gradient of the step   (or N G, with op=SUM)
        E_i = M_i - G

    Parameters of one dimension, and those that would not become smaller, are sent uncompressed. The columns
    of a channels_last parameter are in the order of its memory. All P of a bucket and the uncompressed
    parameters are sent in one all-reduce, all Q in another one.

    Attributes:
        rank: r, the rank of the approximation; 1 to 4 in the paper.
        warmup_steps: number of steps at the beginning in which gradients are not compressed.
        error_feedback: whether E_i is kept; the paper does.
        min_compression_rate: a matrix is compressed if that makes it smaller by more than this factor.
        seed: seed of the first Q, which is normally distributed and the same on all ranks.

    Raises:
        InvalidArgument: at construction.

    Cost: all-reduces of r n and r m words for each matrix; three products of r n m multiplications. Keeps one
        residual of the size of the gradients, which differs by rank (see `mpisgd.compress.residual`), and
        each Q, the same on all ranks.
    """

    rank: int
    warmup_steps: int = 0
    error_feedback: bool = True
    min_compression_rate: float = 1.0
    seed: int = 0

    @classmethod
    def examples(cls) -> Sequence["PowerSGD"]:
        """See `Compressor`."""
        return (
            cls(rank=1),
            cls(rank=2, warmup_steps=2, seed=1),
            cls(rank=1, error_feedback=False, min_compression_rate=1.5),
        )

    def __post_init__(self) -> None:
        check_positive("PowerSGD", "rank", self.rank, whole=True)
        check_count("PowerSGD", "warmup_steps", self.warmup_steps)
        check_flag("PowerSGD", "error_feedback", self.error_feedback)
        check_positive("PowerSGD", "min_compression_rate", self.min_compression_rate)
        check_seed("PowerSGD", self.seed)

    def rank_of(self, shape: torch.Size) -> int:
        """Return the rank of the approximation of a parameter of this shape; 0: it is not compressed."""
        if len(shape) < 2 or not shape.numel():
            return 0
        rows, columns = shape[0], shape[1:].numel()
        rank = min(self.rank, rows, columns)
        return rank if rows * columns > self.min_compression_rate * rank * (rows + columns) else 0

    def wide_reducer(self, layout: BucketLayout) -> "PowerSGDReducer":
        """Return the reducer, which approximates the matrices of a bucket."""
        return PowerSGDReducer(layout, self)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`.

        All P are summed over the ranks, and then all Q, which are computed from the sums of P.
        """
        return Coding(collectives=("all_reduce", "all_reduce"), element_s=10e-9, copies=0.0)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.PowerSGD(self.rank, self.warmup_steps, self.error_feedback, self.min_compression_rate)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis [n, r] of a space that contains the columns of `matrix` [n, r]."""
    basis: Tensor = torch.linalg.qr(matrix)[0]
    return basis


@dataclass
class _Factors(Waiting):
    """What is kept.

    Attributes:
        factors: Q of each parameter; None of those that travel as they are. None: all begin anew.
    """

    factors: list[Tensor | None] | None = alike(None)


class PowerSGDReducer(BucketReducer):
    """The working part of `PowerSGD`."""

    state: _Factors

    def __init__(self, layout: BucketLayout, choice: PowerSGD) -> None:
        self._layout = layout
        self._choice = choice
        self._ranks = [choice.rank_of(shape) for shape in layout.shapes]
        self._matrices = [place for place, rank in enumerate(self._ranks) if rank]
        self._others = [place for place, rank in enumerate(self._ranks) if not rank]
        self._words = self._count_words()
        self.state = _Factors()
        self.memory = memory_of(layout, choice.error_feedback, self.state)
        self._was_compressed: bool | None = None
        self._fit_factors()

    @property
    def _compresses_next(self) -> bool:
        return bool(self._matrices) and self.state.steps >= self._choice.warmup_steps

    def _count_words(self) -> tuple[int, int]:
        """Return how many elements travel in the first all-reduce and in the second."""
        shapes, ranks = self._layout.shapes, self._ranks
        first = sum(
            rank * shape[0] if rank else shape.numel() for shape, rank in zip(shapes, ranks, strict=True)
        )
        second = sum(ranks[place] * shapes[place][1:].numel() for place in self._matrices)
        return first, second

    def _first_factor(self, place: int) -> Tensor | None:
        """Return a random Q for a parameter, the same on all ranks."""
        if not (rank := self._ranks[place]):
            return None
        shape = self._layout.shapes[place]
        random = generator(self._choice.seed, 0, shape.numel())
        drawn = torch.from_numpy(random.standard_normal((shape[1:].numel(), rank)))
        return drawn.to(self._layout.device, self._layout.dtype)

    # -- a step -------------------------------------------------------------------------------------

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Replace the bucket by the product of the factors of all ranks; see `BucketReducer.reduce`."""
        self._was_compressed = self._compresses_next
        self.state.steps += 1
        if self._was_compressed:
            self._reduce_factors(bucket, group, op)
        else:
            SumReducer(bucket.nbytes).reduce(bucket, group, op)

    def _reduce_factors(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        self._fit_factors()
        parts = self._parts_of(self.memory.add(bucket))
        products, plain = self._share_products(parts, group, op)
        if not all(map(is_finite, products)):  # on all ranks
            self._overflow(bucket)
            return
        bases = [orthogonalize(product) for product in products]
        self._share_factors(parts, bases, group, op)
        if not all(is_finite(self._factor(place)) for place in self._matrices):  # the next Q would be NaN
            self._overflow(bucket)
            return
        out = self._parts_of(bucket)  # without a memory `parts` lie there, too, and are not needed any more
        for place, basis in zip(self._matrices, bases, strict=True):
            torch.mm(basis, self._factor(place).T, out=out[place])
        for place, total in zip(self._others, plain, strict=True):
            out[place].copy_(total)
        self._remember(parts, out, 1 / group.size if op is ReduceOp.SUM else 1)

    def _overflow(self, bucket: Tensor) -> None:
        """Make the bucket NaN, as the sum would be, at least in places; begin anew."""
        bucket.fill_(torch.nan)
        self._restart()

    def _restart(self) -> None:
        """Begin anew but for the warm-up."""
        self.memory.reset()
        self.state.factors = None

    def _parts_of(self, flat: Tensor) -> list[Tensor]:
        """Return the matrices in a bucket, and what is none as it lies there."""
        shapes = self._layout.shapes
        parts = cut_by(flat, [shape.numel() for shape in shapes])
        for place in self._matrices:
            parts[place] = parts[place].view(shapes[place][0], -1)
        return parts

    def _factor(self, place: int) -> Tensor:
        assert self.state.factors is not None
        factor = self.state.factors[place]
        assert factor is not None
        return factor

    def _fit_factors(self) -> None:
        """Begin anew with each factor that there is not, or that has another shape."""
        known = self.state.factors or [None] * len(self._ranks)
        fitted: list[Tensor | None] = []
        for rank, shape, factor in zip(self._ranks, self._layout.shapes, known, strict=True):
            fits = factor is not None and factor.shape == (shape[1:].numel(), rank)
            at_home = factor.to(self._layout.device, self._layout.dtype) if factor is not None else None
            fitted.append(at_home if fits else self._first_factor(len(fitted)))
        self.state.factors = fitted

    def _share_products(
        self, parts: Sequence[Tensor], group: Group, op: ReduceOp
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return M Q of each matrix, and what travels as it is, combined over the ranks. Collective."""
        lengths = [self._ranks[place] * len(parts[place]) for place in self._matrices]
        lengths += [parts[place].numel() for place in self._others]
        wire = parts[0].new_empty(self._words[0])
        pieces = cut_by(wire, lengths)
        products = [
            piece.view(-1, self._ranks[place]) for place, piece in zip(self._matrices, pieces, strict=False)
        ]
        plain = list(pieces[len(products) :])
        for place, product in zip(self._matrices, products, strict=True):
            torch.mm(parts[place], self._factor(place), out=product)
        for place, piece in zip(self._others, plain, strict=True):
            piece.copy_(parts[place])
        SumReducer(wire.nbytes).reduce(wire, group, op)
        return products, plain

    def _share_factors(
        self, parts: Sequence[Tensor], bases: Sequence[Tensor], group: Group, op: ReduceOp
    ) -> None:
        """Make Q of each matrix that of all ranks. Collective."""
        wire = parts[0].new_empty(self._words[1])
        pieces = cut_by(wire, [self._factor(place).numel() for place in self._matrices])
        for place, basis, piece in zip(self._matrices, bases, pieces, strict=True):
            torch.mm(parts[place].T, basis, out=piece.view(-1, self._ranks[place]))
        SumReducer(wire.nbytes).reduce(wire, group, op)
        factors = self.state.factors
        assert factors is not None
        for place, piece in zip(self._matrices, pieces, strict=True):
            factors[place] = piece.view(-1, self._ranks[place])

    def _remember(self, parts: Sequence[Tensor], out: Sequence[Tensor], scale: float) -> None:
        """Keep what the products lack of what was meant; nothing of what travelled as it is."""
        if not self.memory.keeps:
            return
        for place in self._matrices:
            parts[place].sub_(out[place], alpha=scale)
        for place in self._others:
            parts[place].zero_()

    # -- between steps ------------------------------------------------------------------------------

    def bytes_on_the_wire(self, size: int) -> int:
        """Return the bytes of all-reduces of r n and of r m words; in the warm-up, of one of n m words."""
        itemsize = self._layout.dtype.itemsize
        compresses = self._compresses_next if self._was_compressed is None else self._was_compressed
        words = self._words if compresses else (self._layout.numel,)
        return sum(SumReducer(count * itemsize).bytes_on_the_wire(size) for count in words)
