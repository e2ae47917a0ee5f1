"""DDP's test of everything: a run on the ranks of a group equals the run of one process on the joined batch.

A test describes one step as a function of a `Trainer`. Every rank runs it twice: with the plain model on
everyone's rows, and with DistributedDataParallel on its own. After each step all parameters are compared, and
all ranks of the group must have the same bits.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from verdicts import referee

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it calls torch.jit.script when imported
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer", "ZeroRedundancyOptimizer"]

STEPS = 4
BATCH = 24  # 1, 2, 3 and 4 ranks divide it, and halves of 4 their 12 rows
FEATURES = 6
SMALL_MB = 1e-4  # about 100 bytes: every larger parameter in a bucket of its own

# In float64. Measured at 2 to 4 ranks: at most 2e-15; with Adam no more, but it divides by small numbers.
DRIFT, ADAM_DRIFT = 2e-14, 1e-13

small_buckets = partial(DDP, bucket_cap_mb=SMALL_MB)


def mlp() -> nn.Module:
    """A small smooth model; its layers are larger than a small bucket."""
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 7, bias=False), nn.Tanh(), nn.Linear(7, 2)
    )


def batch(step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    """The joined batch of one pass: differs by step and pass, by row and by element."""
    draw = torch.Generator().manual_seed(7919 * step + 104729 * micro + 1)
    inputs = torch.randn(BATCH, FEATURES, generator=draw, dtype=torch.float64)
    return inputs, torch.randn(BATCH, 2, generator=draw, dtype=torch.float64)


@dataclass
class Trainer:
    """One of the two runs that are compared.

    Attributes:
        net: what is called: the plain model, or what wraps it.
        opt: its optimizer.
        model: the plain model in both runs.
        rank, size: the rows it trains on: the `rank`-th of `size` parts.
        distributed: which of the two.
    """

    net: nn.Module
    opt: torch.optim.Optimizer
    model: nn.Module
    rank: int
    size: int
    distributed: bool

    def rows(self, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Its part of a batch."""
        inputs, targets = batch(step, micro)
        return inputs.chunk(self.size)[self.rank], targets.chunk(self.size)[self.rank]

    def loss(self, step: int, micro: int = 0) -> Tensor:
        """The mean squared error of its rows."""
        inputs, targets = self.rows(step, micro)
        return nn.functional.mse_loss(self.net(inputs), targets)


Step = Callable[[Trainer, int], Any]
Wrap = Callable[..., nn.Module]


def plain_step(run: Trainer, step: int) -> None:
    run.opt.zero_grad()
    run.loss(step).backward()
    run.opt.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)


def trainers(
    model: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    wrap: Wrap = small_buckets,
    group: Any = None,
    sharded: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> tuple[Trainer, Trainer]:
    """Return (the run of one process, that of this rank); the ranks' models begin differently.

    Args:
        model: makes it.
        optimizer: makes one for a model.
        wrap: makes of the model what is called; gets `process_group`.
        group: whose ranks train together.
        sharded: makes the optimizer of the distributed run, where that is another one.
        dtype: of all parameters; None leaves them as they are.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(100)
    plain = model().to(dtype)
    torch.manual_seed(100 + rank)
    shared = model().to(dtype)
    net = wrap(shared, process_group=group)
    return (
        Trainer(plain, optimizer(plain), plain, 0, 1, False),
        Trainer(net, (sharded or optimizer)(shared), shared, rank, size, True),
    )


def check_equal(
    step: Step = plain_step, *, steps: int = STEPS, tol: float = DRIFT, group: Any = None, **how: Any
) -> tuple[Trainer, Trainer]:
    """Train both ways and compare after each step; `how`: see `trainers`. Return both."""
    plain, ours = trainers(group=group, **how)
    worst = 0.0
    for number in range(steps):
        step(plain, number)
        step(ours, number)
        worst = max(worst, judge(plain.model.parameters(), ours.model.parameters(), tol, group))
    print(f"max difference {worst:.1e}")
    return plain, ours


def judge(plain: Iterable[Tensor], ours: Iterable[Tensor], tol: float, group: Any = None) -> float:
    """Return the largest difference on any rank.

    Fails on all ranks where it is too large, or where the ranks of one group have different bits.
    """
    ours = list(ours)
    mine = max(drift(one, other) for one, other in zip(plain, ours, strict=True))
    members = tuple(dist.get_process_group_ranks(group))
    seen = referee().allgather((members, digest(ours), mine))
    if len({(members, bits) for members, bits, _ in seen}) > len({members for members, _, _ in seen}):
        pytest.fail("the ranks of a group have different bits")
    worst = max(off for _, _, off in seen)
    if worst > tol:
        pytest.fail(f"off by {worst:.3g}, tolerated {tol:.3g}")
    return worst


def drift(a: Tensor, b: Tensor) -> float:
    """The largest difference; inf where one of them is not finite."""
    difference = (a.detach().double() - b.detach().double()).abs().max().item()
    return difference if difference == difference else float("inf")


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the bits of tensors."""
    told = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        told.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return told.hexdigest()
