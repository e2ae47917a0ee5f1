"""`Sharded(2)` frees gradients while backward goes on: two buckets may be under way, and no third.

Backward waits for a bucket when the second one after it is launched. So it stands still only where NCCL is
more than a bucket behind: then memory is what it waits for, which stage 2 promises to bound.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from gpu_under_test import DEVICE, gpu
from harness import pair, plain_step
from simulated_gpu.nccl import Collective
from torch import nn
from verdicts import everyone

import mpisgd
from mpisgd.gradients.launcher import BucketLauncher

pytestmark = [
    pytest.mark.parametrize("device", ["nccl"], indirect=True),
    pytest.mark.mpi(min_size=2),
]


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)), nn.Linear(4, 2, bias=False))


def reached(event: Any, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not event.query() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(event.query())


@pytest.mark.parametrize(("under_way", "goes_on"), [(2, True), (3, False)])
def test_backward_goes_on_while_two_buckets_are_under_way(device, simulated, monkeypatch, under_way, goes_on):
    """The latest buckets are kept from arriving, whatever comes."""
    simulated.device.streams.latency_s = 0.0
    made: list[Collective] = []
    held: set[Collective] = set()
    firsts: list[int] = []
    seen: list[bool] = []
    make, poll, launch = Collective.__init__, Collective.poll, BucketLauncher.launch_by
    _, ours = pair(model=deep, strategy=mpisgd.Sharded(2), bucket_cap_bytes=1, overlap=True)
    plain_step(ours, 0)

    def noted(self: Collective, *about: Any) -> None:
        make(self, *about)
        made.append(self)
        held.add(self)

    def launched(self: Any, *about: Any) -> None:
        firsts.append(len(made))
        launch(self, *about)
        if len(firsts) >= under_way:
            held.difference_update(made[: firsts[-under_way]])
            event = gpu.current_stream(torch.device(DEVICE, gpu.current_device())).record_event()
            seen.append(reached(event, 5.0 if goes_on else 0.1))

    monkeypatch.setattr(Collective, "__init__", noted)
    monkeypatch.setattr(Collective, "poll", lambda self: self not in held and poll(self))
    monkeypatch.setattr(BucketLauncher, "launch_by", launched)
    ours.opt.zero_grad()
    ours.backward(1)
    held.clear()
    everyone(len(firsts) >= 7, f"{firsts}")
    everyone(len(seen) > 3 and set(seen) == {goes_on}, f"{seen}")
    monkeypatch.undo()
    ours.opt.step()
