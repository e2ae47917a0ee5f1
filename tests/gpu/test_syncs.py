"""How often the host waits for the GPU: by NCCL not at all, unless it needs to know something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_under_test import DEVICE
from harness import FEATURES, mlp, pair, plain_step
from torch import nn
from verdicts import everyone

import mpisgd
from mpisgd.gradients import gradient_flags

BY_NCCL = pytest.mark.parametrize("device", ["nccl"], indirect=True)

pytestmark = [BY_NCCL, pytest.mark.mpi(min_size=2)]


def num_syncs(simulated: Any, call: Callable[[], Any], times: int = 2) -> int:
    """How often the host waits in a call, when it has been called before."""
    counts = []
    for _ in range(times):
        before = simulated.device.streams.num_syncs
        call()
        counts.append(simulated.device.streams.num_syncs - before)
    return counts[-1]


@pytest.mark.parametrize("strategy", [mpisgd.Synchronous(), mpisgd.Sharded(1), mpisgd.Sharded(2)], ids=str)
@pytest.mark.parametrize(("looks", "wanted"), [(False, 0), (True, 1)])
def test_a_step_waits_once_for_all_buckets_where_it_looks_for_infinities(
    device, simulated, strategy, looks, wanted
):
    _, ours = pair(bucket_cap_bytes=64, strategy=strategy, error_if_nonfinite=looks)
    steps = iter(range(3))
    found = num_syncs(simulated, lambda: plain_step(ours, next(steps)), 3)
    everyone(found == wanted, f"{found}")


def test_infinities_are_named_as_where_the_host_looks_at_each_bucket(device, simulated):
    _, ours = pair(bucket_cap_bytes=64, error_if_nonfinite=True)
    names = [name for name, _ in ours.model.named_parameters()]
    for step in range(3):
        plain_step(ours, step)
        ours.opt.zero_grad()
        loss = ours.loss(step)
        if mpisgd.rank() == mpisgd.size() - 1:
            loss = loss + ours.model[2].weight.sum() * float("nan")
        with pytest.raises(mpisgd.NonFiniteGradients) as caught:
            loss.backward()
        text = str(caught.value)
        everyone(f"rank {mpisgd.size() - 1}: {names[2]}" in text and "rank 0" not in text, text)
        for param in ours.model.parameters():
            param.grad = None


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_over_all_ranks_waits_for_nothing(device, simulated, momentum):
    torch.manual_seed(5)
    model = nn.Sequential(mpisgd.SyncBatchNorm(FEATURES, momentum=momentum), *mlp()).to(DEVICE)
    inputs = torch.randn(6, FEATURES).to(DEVICE).requires_grad_()
    found = num_syncs(simulated, lambda: model(inputs).sum().backward())
    everyone(found == 0, f"{found}")


def test_a_mean_of_gradients_by_hand_waits_for_nothing(device, simulated):
    model = mlp().to(DEVICE)
    inputs = torch.ones(3, FEATURES, device=DEVICE)

    def step() -> None:
        model.zero_grad()
        model(inputs).sum().backward()
        mpisgd.average_gradients(model)

    found = num_syncs(simulated, step)
    everyone(found == 0, f"{found}")


@pytest.mark.parametrize("cap", [64, 2**20])
def test_a_step_has_one_exchange_on_the_host_whatever_the_buckets(device, simulated, monkeypatch, cap):
    """Which gradients exist on any rank; the GPU goes on with what is queued meanwhile."""
    exchanges, real = [], gradient_flags.all_reduce
    monkeypatch.setattr(gradient_flags, "all_reduce", lambda *about: (exchanges.append(1), real(*about))[1])
    _, ours = pair(bucket_cap_bytes=cap)
    plain_step(ours, 0)
    before = len(exchanges)
    plain_step(ours, 1)
    everyone(len(exchanges) - before == 1, f"{len(exchanges) - before}")
