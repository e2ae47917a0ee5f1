"""`Division`: data divided among ranks at random, and how they are trained on; drawn from a seed.

Losses are linear, and their gradients are whole numbers over powers of two. So every sum is exact, whatever
its order, and what `join()` computes can be compared bit for bit with one process.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHAPES = ((3,), (2, 5), (7,))
SYNCHRONOUS = (
    "",
    "strategy=mpisgd.Sharded(stage=1)",
    "strategy=mpisgd.Sharded(stage=2)",
    "strategy=mpisgd.Sharded(stage=1, overlap_forward=True)",
    'strategy=mpisgd.ParameterServer(mode="sync")',
    "share_parameters=True",
    "overlap=True",
    "bucket_cap_bytes=1",
    "gradient_predivide_factor=2.0",
    "check_in_sync_every=1",
    "error_if_nonfinite=True",
    "op=mpisgd.ReduceOp.SUM",
)
LOCAL = (
    "strategy=mpisgd.LocalSGD(sync_every=1)",
    "strategy=mpisgd.LocalSGD(sync_every=2)",
    "strategy=mpisgd.LocalSGD(sync_every=3)",
    "strategy=mpisgd.DiLoCo(sync_every=2)",
)
METHODS = (*SYNCHRONOUS, *LOCAL)
BATCH_SIZES = (1, 2, 4, 8)
MOST_BATCHES = 5
NO_SYNC, PASSES = "no_sync", "passes"


@dataclass(frozen=True)
class Division:
    """A training.

    Attributes:
        seed: what it was drawn from.
        ranks_per_host: how many ranks each host has.
        method: options of `DistributedOptimizer`.
        batches: of each rank, how many rows each of them has.
        gives_examples: whether the program says how many these are.
        accumulates: backward passes of a step: 1, or 2 by `no_sync()` or by `backward_passes_per_step`.
        way: which of both, "" for one pass.
        clips: "", "by the optimizer", or "by torch".
        scaled: whether by a GradScaler, one of whose losses overflows.
        scheduled: whether a scheduler changes the learning rate after every step.
    """

    seed: int
    ranks_per_host: tuple[int, ...]
    method: str
    batches: tuple[tuple[int, ...], ...]
    gives_examples: bool
    accumulates: int = 1
    way: str = ""
    clips: str = ""
    scaled: bool = False
    scheduled: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.batches)

    @property
    def is_local(self) -> bool:
        """Whether ranks step by themselves."""
        return self.method in LOCAL

    @property
    def sums(self) -> bool:
        """Whether gradients are added up."""
        return "SUM" in self.method

    @property
    def overflows(self) -> tuple[int, int] | None:
        """The rank, and the batch of it, whose loss is infinite."""
        return (0, 1) if self.scaled and len(self.batches[0]) > 1 else None


def drawn(seed: int) -> Division:
    """Return the division of a seed; the methods go round."""
    chance = random.Random(seed)
    size = chance.choice((1, 2, 2, 3, 3, 3, 4, 4))
    method = METHODS[seed % len(METHODS)]
    local, sums = method in LOCAL, "SUM" in method
    batches = tuple(
        tuple(chance.choice(BATCH_SIZES) for _ in range(chance.randint(0, MOST_BATCHES))) for _ in range(size)
    )
    way = chance.choice(("", "", NO_SYNC, PASSES)) if not local else ""
    clips = chance.choice(("", "", "by the optimizer", "by torch")) if not local else ""
    if clips == "by torch" and ("Sharded" in method or "Server" in method or "share" in method):
        clips = "by the optimizer"
    return Division(
        seed,
        chance.choice([(size,), (1,) * size, (size - size // 2, size // 2) if size > 1 else (size,)]),
        method,
        batches,
        gives_examples=not sums and chance.random() < 0.7,
        accumulates=2 if way else 1,
        way=way,
        clips=clips,
        scaled=not local and "nonfinite" not in method and not way and chance.random() < 0.25,
        scheduled=chance.random() < 0.3,
    )


def rows_of(division: Division, rank: int, batch: int) -> Sequence[Tensor]:
    """Return the rows of a batch, by parameter: whole numbers, whose mean is the gradient."""
    count = division.batches[rank][batch]
    generator = torch.Generator().manual_seed(division.seed * 10_000 + rank * 100 + batch)
    return [torch.randint(-3, 4, (count, *shape), generator=generator).to(torch.float64) for shape in SHAPES]
