"""Device tensors arrive in their order, some ahead of their use, and after what was queued before them."""

from __future__ import annotations

import pytest
import torch
from gpu_under_test import DEVICE, gpu

import mpisgd
from mpisgd.accelerator import host_copy
from mpisgd.accelerator.buffers import round_to_device
from mpisgd.accelerator.host_copy import prefetch_to_host
from mpisgd.accelerator.own_streams import OwnStreams


def test_what_is_on_the_host_is_not_copied():
    tensors = [torch.arange(3.0), torch.arange(5.0)]
    found = prefetch_to_host(tensors, OwnStreams())
    assert [a is b for a, b in zip(found, tensors, strict=True)] == [True, True]


@pytest.mark.parametrize("ahead_bytes", [0, 30, 10**6])
def test_copies_arrive_in_order_and_complete(simulated, monkeypatch, ahead_bytes):
    monkeypatch.setattr(host_copy, "AHEAD_BYTES", ahead_bytes)
    copies, real = [], simulated.copy
    monkeypatch.setattr(simulated, "copy", lambda *pair: (copies.append(1), real(*pair)))
    tensors = [torch.zeros(4, device=DEVICE) for _ in range(5)]
    for k, tensor in enumerate(tensors):
        tensor.fill_(k)  # late: the copies come after it
    found = []
    for k, there in enumerate(prefetch_to_host(tensors, OwnStreams())):
        assert there.tolist() == [k] * 4
        found.append(there)
        ahead = len(copies) - len(found)
        assert ahead <= max(0, ahead_bytes // 16)
    assert len(found) == 5


def test_a_step_with_its_state_on_the_host_takes_no_further_stream(simulated, monkeypatch):
    """torch has 32 streams: a new one in each step was one of the program's soon."""
    made, real = [], simulated.new_stream
    monkeypatch.setattr(simulated, "new_stream", lambda place: (made.append(place), real(place))[1])
    model = torch.nn.Linear(3, 2).to(DEVICE)
    mpisgd.broadcast_parameters(model)
    strategy = mpisgd.Sharded(offload=mpisgd.Offload())
    optimizer = mpisgd.DistributedOptimizer(torch.optim.Adam(model.parameters()), strategy=strategy)
    numbers = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3, device=DEVICE)).sum().backward()
        optimizer.step()
        numbers.append(len(made))
    assert len(set(numbers[1:])) == 1, f"{numbers}"


def test_a_host_tensor_may_change_once_it_is_on_its_way(simulated):
    master, param = torch.full((3,), 1.0 + 2**-12), torch.zeros(3, dtype=torch.bfloat16, device=DEVICE)
    round_to_device(master, param)
    master.zero_()
    gpu.current_stream().synchronize()
    assert param.tolist() == [1.0] * 3
