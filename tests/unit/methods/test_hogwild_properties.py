"""What `ParameterServer(locked=False)` promises, under schedules in which updates are lost."""

from __future__ import annotations

import pytest
import torch
from hogwild_programs import STEPS, Ended, ReadsThenWrites, num_applied, start, train

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.methods.hogwild.paper import violated
from mpisgd.methods.paper_kit import Vec

SIZE = 3


def ended(seed: int, kind: type[torch.optim.Optimizer], staleness_steps: int | None = None) -> list[Ended]:
    return run_ranks(SIZE, lambda: train(kind, staleness_steps), seed=seed)


@pytest.mark.parametrize("staleness_steps", [None, 1])
def test_the_properties_hold_while_updates_are_lost(staleness_steps):
    lost = []
    for seed in range(15):
        ends = ended(seed, ReadsThenWrites, staleness_steps)
        assert violated(start(), ends[0].end, {i: one.updates for i, one in enumerate(ends)}) == []
        assert all(torch.equal(one.end[name], ends[0].end[name]) for one in ends for name in one.end)
        assert ends[0].counters.pushed == ends[0].counters.begun == [STEPS] * SIZE
        if staleness_steps is not None:
            assert max(ends[0].counters.lead) <= staleness_steps
        lost += [SIZE * STEPS - count for count in num_applied(ends)]
    assert max(lost) > 0
    assert max(lost) < SIZE * STEPS


def test_no_update_is_lost_where_nobody_reads_before_another_writes():
    for seed in range(5):
        assert num_applied(ended(seed, torch.optim.SGD)) == [SIZE * STEPS] * 3


def test_of_a_mean_an_update_counts_by_the_share_of_its_rank():
    ends = run_ranks(SIZE, lambda: train(torch.optim.SGD, op=mpisgd.ReduceOp.AVG), seed=0)
    assert violated(start(), ends[0].end, {i: one.updates for i, one in enumerate(ends)}, close=1e-9) == []


def updated(x: float, y: float) -> list[str]:
    """What does not hold where rank 0 alone has updated x, by 2, and both ranks y, by 1."""
    start, end = (Vec(x=torch.tensor([a]), y=torch.tensor([b])) for a, b in ((0.0, 0.0), (x, y)))
    two, one = torch.tensor([2.0]), torch.tensor([1.0])
    return violated(start, end, {0: [Vec(x=two, y=one)], 1: [Vec(y=one)]})


def test_what_does_not_hold_is_named():
    assert updated(2.0, 1.0) == updated(2.0, 2.0) == []
    assert updated(0.0, 1.0) == ["alone: x", "last: x"]
    assert updated(-1.0, 1.0) == ["bounded: x", "alone: x"]
    assert updated(4.0, 1.0) == ["bounded: x", "alone: x"]
    assert updated(2.0, 3.0) == ["bounded: y"]
    assert updated(2.0, 0.0) == ["last: y"]
