"""Gradients that are known beforehand, and optimizers whose parameters get them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import mpisgd

SHAPES = [(6, 5), (7,), (4, 3, 2), (1,)]
NUMELS = [30, 7, 24, 1]
TWO_BUCKETS = 32 * 8  # bytes: the matrix is alone, the rest is together


def gradient(rank: int, step: int, which: int) -> Tensor:
    """Different for every rank, step, parameter and element."""
    draw = torch.Generator().manual_seed(100_000 * rank + 1000 * step + which)
    return torch.randn(SHAPES[which], dtype=torch.float64, generator=draw)


class Trained:
    """Parameters, the optimizer over them, and steps with the gradients of this rank.

    Attributes:
        params: of `SHAPES`.
        opt: a distributed SGD.
        unused: places of the parameters that have no gradient, by step.
    """

    def __init__(self, unused: dict[int, set[int]] | None = None, **options: Any) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
        self.opt = mpisgd.DistributedOptimizer(torch.optim.SGD(self.params, lr=0.1), **options)
        self.unused = unused or {}

    def backward(self, step: int, *, rank: int | None = None, order: int = 1) -> None:
        """Let backward make the gradients of a step."""
        mine, left = mpisgd.rank() if rank is None else rank, self.unused.get(step, set())
        used = [which for which in range(len(SHAPES)) if which not in left]
        terms = [(self.params[which] * gradient(mine, step, which)).sum() for which in used[::order]]
        torch.stack(terms).sum().backward()

    def step(self, step: int, **how: Any) -> list[Tensor | None]:
        """Train a step; return what the gradients have become."""
        self.opt.zero_grad()
        self.backward(step, **how)
        reduced = [None if param.grad is None else param.grad.clone() for param in self.params]
        self.opt.step()
        return reduced

    def kept(self, what: str = "residual") -> list[Tensor]:
        """What this rank keeps of each parameter, flat; zeros before there is any."""
        own = self.opt.state_dict()["mpisgd"]["own"].get("compression", {"own": {}})["own"]
        numels = [math.prod(shape) for shape in SHAPES]
        none = [torch.zeros(numel, dtype=torch.float64) for numel in numels]
        return [own.get(str(i), {}).get(what, zeros).clone() for i, zeros in enumerate(none)]


def mean_over_ranks(tensors: list[Tensor]) -> list[Tensor]:
    """The plain averages."""
    averaged = [tensor.clone() for tensor in tensors]
    for tensor in averaged:
        mpisgd.all_reduce(tensor, mpisgd.ReduceOp.AVG)
    return averaged


def largest_difference(got: list[Tensor], expected: list[Tensor]) -> float:
    """Of any element."""
    pairs = zip(got, expected, strict=True)
    return max((a.flatten() - b.flatten()).abs().max().item() for a, b in pairs)
