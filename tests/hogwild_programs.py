"""Trainings without locks, and what holds of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import mpisgd
from mpisgd.methods.paper_kit import Vec
from mpisgd.threads import scheduling

SHAPES = {**{f"of rank {rank}": (2, 3) for rank in range(4)}, "common": (5,)}
STEPS = 6


class Ended(NamedTuple):
    """What a rank has: its updates, the parameters at the end of all, and what was counted."""

    updates: list[Vec]
    end: Vec
    counters: Any


class ReadsThenWrites(torch.optim.SGD):
    """SGD during whose update of an element others may update it, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                read = param.clone()
                scheduling.sleep(0.001)
                param.copy_(read - group["lr"] * param.grad)


def start() -> Vec:
    return Vec({name: torch.arange(torch.Size(s).numel()).double().view(s) for name, s in SHAPES.items()})


def gradient(rank: int, step: int) -> Vec:
    """Powers of two, by which one sees what was applied."""
    names = (f"of rank {rank}", "common")
    g = Vec({name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in names})
    bit = 2.0 ** (STEPS * rank + step)
    g[names[0]].fill_(-bit)
    g["common"][:3] = -bit
    g["common"][3] = bit if step % 2 else -bit
    return g


def train(
    kind: type[torch.optim.Optimizer],
    staleness_steps: int | None = None,
    op: mpisgd.ReduceOp = mpisgd.ReduceOp.SUM,
) -> Ended:
    """Collective."""
    share = 1.0 if op is mpisgd.ReduceOp.SUM else 1.0 / mpisgd.size()
    params = {name: torch.nn.Parameter(value) for name, value in start().items()}
    mode = "async" if staleness_steps is None else "ssp"
    optimizer: Any = mpisgd.DistributedOptimizer(
        kind(list(params.values()), lr=0.5),
        params.items(),
        strategy=mpisgd.ParameterServer(mode, staleness_steps=staleness_steps, locked=False),
        op=op,
    )
    updates = []
    for step in range(STEPS):
        g = gradient(mpisgd.rank(), step)
        for name, param in params.items():
            param.grad = g.get(name)
        optimizer.step()
        updates.append(-0.5 * share * g)
    optimizer.synchronizer.finish()
    mpisgd.barrier()  # all have finished
    end = Vec({name: param.detach().clone() for name, param in params.items()})
    return Ended(updates, end, optimizer.synchronizer.counters())


def num_applied(ends: list[Ended]) -> list[int]:
    """How many updates are in each of the first three common elements."""
    change = (ends[0].end["common"] - start()["common"])[:3]
    return [int(each).bit_count() for each in (2 * change).tolist()]
