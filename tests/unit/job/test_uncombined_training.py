"""Who starts equal, trains and combines nothing is told so; not where torch combines by another backend."""

from __future__ import annotations

import pytest
import torch

import mpisgd
from mpisgd.job import uncombined_training
from mpisgd.job.job_of_thread import job_place
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.monitor.step_counter import counter


@pytest.mark.parametrize("has_process_group", [False, True])
@pytest.mark.parametrize("averages", [False, True])
def test_who_combines_nothing_is_told(averages, has_process_group, capfd, monkeypatch):
    monkeypatch.setattr(uncombined_training.dist, "is_initialized", lambda: has_process_group)
    monkeypatch.setattr(counter, "words", counter.words[:])

    def train() -> None:
        weight = torch.ones(3)
        mpisgd.broadcast_parameters([("weight", weight)])
        if mpisgd.rank() == 0:
            counter.words[0] += 2  # steps of an optimizer of torch
        if averages:
            mpisgd.all_reduce(weight)
        job = job_place().job
        for look in [each for each in job.before_end if isinstance(each, uncombined_training._LastBroadcast)]:
            look()

    run_ranks(2, train)
    said = capfd.readouterr().err.count("Wrap the optimizer in mpisgd.DistributedOptimizer")
    assert bool(said) == (not averages and not has_process_group)
