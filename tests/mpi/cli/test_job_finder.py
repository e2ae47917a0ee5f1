"""A running job, looked at as `mpisgd top` does, which is no part of it."""

from __future__ import annotations

import os
import time

import torch
from verdicts import everyone

import mpisgd
from mpisgd.monitor.hang_report import main_wait, missing
from mpisgd.monitor.rank_state import WAITS
from mpisgd.tools.cli.job_finder import choose_job

LIMIT_S = 60.0


def make_steps(num: int) -> None:
    """Every rank by itself."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for _ in range(num):
        optimizer.step()


def states_when_all_others_wait() -> tuple:
    """What rank 0 finds, once the others have waited for it long enough to say so."""
    job, limit_s = choose_job(os.getpid()), time.monotonic() + LIMIT_S
    while True:
        states = job.states("here")
        if all(state.state == WAITS for state in states[1:]) or time.monotonic() > limit_s:
            return job, states


def test_steps_and_waits_of_all_ranks_are_seen_from_outside():
    rank, size = mpisgd.rank(), mpisgd.size()
    mpisgd.init()
    make_steps(3 + rank)
    pids = [None] * size
    mpisgd.all_gather_object(pids, os.getpid())
    seen = []
    if rank == 0:
        job, states = states_when_all_others_wait()
        seen = [
            (job.size, job.pids),
            [member.steps.number for member in job.members.values()],
            [state.pid for state in states],
            [(state.state, missing(main_wait(state), states)) for state in states[1:]],
        ]
    mpisgd.barrier()
    expected = [(size, pids), [3 + r for r in range(size)], pids, [(WAITS, [0])] * (size - 1)]
    everyone(rank != 0 or seen == expected, f"{seen}, not {expected}")
