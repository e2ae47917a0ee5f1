"""A resumed run is the run that was never interrupted: to the bit, or in float64 at another size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler
from verdicts import everyone, same_on_all_ranks

import mpisgd
from mpisgd import Group, checkpoint

NUM_EXAMPLES = 60
BATCH = 12  # of all ranks; five batches an epoch
SAVED_AT, STEPS = 7, 14  # in the middle of the second epoch; into the third


class Shuffled(Sampler[int]):
    """This rank's share of each batch of each epoch, from wherever it is."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.epoch, self.done = group.rank, group.size, 0, 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(NUM_EXAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[self.done * BATCH + self.rank :: self.size])

    def record(self) -> bool:
        """Count a batch; whether the epoch is over."""
        self.done += 1
        if self.done * BATCH == NUM_EXAMPLES:
            self.epoch, self.done = self.epoch + 1, 0
        return self.done == 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]


class Run:
    """Training by a group, with everything that has a state."""

    def __init__(self, group: Group, *, seed: int, dropout: float) -> None:
        torch.manual_seed(100 * seed + group.rank)
        np.random.seed(seed + group.rank)
        random.seed(seed + group.rank)
        draw = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(NUM_EXAMPLES, 4, generator=draw, dtype=torch.float64)
        self.targets = self.inputs.sin().sum(dim=1, keepdim=True)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1, bias=False)
        ).double()
        mpisgd.broadcast_parameters(self.model, group.ranks[0], group)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        self.optimizer = mpisgd.DistributedOptimizer(optimizer, group=group)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.sampler = Shuffled(group)
        self.group = group

    @property
    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "sampler")
        return {name: getattr(self, name) for name in names}

    def train(self, num_steps: int) -> list[float]:
        """The losses of all ranks' examples."""
        losses: list[float] = []
        while True:
            loader = DataLoader(
                torch.utils.data.TensorDataset(self.inputs, self.targets),
                BATCH // self.group.size,
                sampler=self.sampler,
                generator=torch.Generator(),  # else each new loader draws from the generator of the dropout
            )
            for inputs, targets in loader:
                if len(losses) == num_steps:
                    return losses
                losses.append(self.step(inputs, targets))
                if self.sampler.record():
                    break

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        noise = np.random.rand() + random.random()  # any of the generators may matter
        loss = ((self.model(inputs) - targets) ** 2).mean() * (1 + 1e-3 * noise * self.model[2].p)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        total = loss.detach().clone()
        mpisgd.all_reduce(total, mpisgd.ReduceOp.AVG, self.group)
        return total.item()


def world() -> Group:
    from mpisgd.job.lifecycle import world as of_job

    return of_job()


def test_a_resumed_run_continues_bit_by_bit(folder: Path) -> None:
    run = Run(world(), seed=1, dropout=0.3)
    run.train(SAVED_AT)
    path = checkpoint.save(folder, SAVED_AT, **run.state, note=("plain", {"value": 0.1}))
    same_on_all_ranks(path)
    expected = run.train(STEPS - SAVED_AT)

    resumed = Run(world(), seed=2, dropout=0.3)
    found = checkpoint.load(folder, **resumed.state)
    assert (found.step, found.ranks, found.path) == (SAVED_AT, mpisgd.size(), path)
    assert dict(found) == {"note": ("plain", {"value": 0.1})}
    losses = resumed.train(STEPS - SAVED_AT)
    everyone(losses == expected, f"{losses} != {expected}")
    pairs = zip(run.model.parameters(), resumed.model.parameters(), strict=True)
    everyone(all(torch.equal(ours, theirs) for ours, theirs in pairs))

    without = Run(world(), seed=2, dropout=0.3)  # that all of this matters
    checkpoint.load(folder, **without.state, rng=False)
    assert without.train(STEPS - SAVED_AT) != expected


@pytest.mark.parametrize("fewer", [True, False])
def test_a_run_goes_on_at_another_number_of_ranks(folder: Path, alone: Group, fewer: bool) -> None:
    before, after = (world(), alone) if fewer else (alone, world())
    run = Run(before, seed=1, dropout=0.0)
    run.train(SAVED_AT)
    if fewer or mpisgd.rank() == 0:
        checkpoint.save(folder, SAVED_AT, **run.state, group=before)
    expected = run.train(STEPS - SAVED_AT)
    mpisgd.barrier()

    resumed = Run(after, seed=2, dropout=0.0)
    assert checkpoint.load(folder, **resumed.state, group=after).ranks == before.size
    losses = resumed.train(STEPS - SAVED_AT)
    everyone(losses == pytest.approx(expected, rel=1e-12), f"{losses} != {expected}")
    assert losses[-1] < expected[0]


def test_ranks_that_there_were_not_draw_numbers_of_their_own(folder: Path, alone: Group) -> None:
    if mpisgd.rank() == 0:
        checkpoint.save(folder, 1, step_size=1, group=alone)
    mpisgd.barrier()
    drawn = []
    for _ in range(2):
        checkpoint.load(folder)
        drawn.append((torch.rand(1).item(), float(np.random.rand()), random.random()))
    everyone(drawn[0] == drawn[1], "not the same every time")
    everyones: list[Any] = [None] * mpisgd.size()
    mpisgd.all_gather_object(everyones, drawn[0])
    for place in range(3):
        assert len({numbers[place] for numbers in everyones}) == mpisgd.size()


def test_optimizer_state_keeps_its_own_dtype(folder: Path) -> None:
    """`Optimizer.load_state_dict` would round it to that of the parameters."""

    def half() -> torch.optim.Optimizer:
        param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([param], lr=0.1)
        optimizer.state[param]["residual"] = torch.full((3,), 1 + 2.0**-20)
        return optimizer

    checkpoint.save(folder, 1, optimizer=half())
    optimizer = half()
    optimizer.state.clear()
    checkpoint.load(folder, optimizer=optimizer)
    (state,) = optimizer.state.values()
    assert state["residual"].dtype == torch.float32
    assert torch.equal(state["residual"], torch.full((3,), 1 + 2.0**-20))
