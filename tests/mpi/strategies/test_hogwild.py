"""What `ParameterServer(locked=False)` promises, among processes that really write at the same time."""

from __future__ import annotations

import pytest
import torch
from hogwild_programs import STEPS, Ended, ReadsThenWrites, start, train
from verdicts import everyone

import mpisgd
from mpisgd.job.lifecycle import world
from mpisgd.methods.hogwild.paper import violated


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, ReadsThenWrites])
@pytest.mark.parametrize("staleness_steps", [None, 1])
def test_the_properties_hold(kind, staleness_steps):
    if world().shared_memory is None:
        pytest.skip("needs memory that the ranks share")
    ends: list[Ended | None] = [None] * mpisgd.size()
    mpisgd.all_gather_object(ends, train(kind, staleness_steps))
    found = [one for one in ends if one is not None]
    said = violated(start(), found[0].end, {rank: one.updates for rank, one in enumerate(found)})
    everyone(not said, f"{said}")
    everyone(found[0].counters.pushed == [STEPS] * mpisgd.size(), f"{found[0].counters}")
