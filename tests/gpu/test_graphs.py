"""While a CUDA graph is captured nothing is communicated: that is refused on every rank, with the reason."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from gpu_under_test import DEVICE, gpu
from harness import mlp, pair, plain_step
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd.transport.device.nccl_watch import POLL_S

CYCLES_PER_S = 2_000_000_000


def ones() -> Any:
    return torch.ones(5, device=DEVICE)


CALLS = {
    "all_reduce": lambda tensor: mpisgd.all_reduce(tensor),
    "asynchronous": lambda tensor: mpisgd.all_reduce(tensor, async_op=True),
    "through the host": lambda tensor: mpisgd.all_reduce(tensor, algorithm="mpi"),
    "broadcast": lambda tensor: mpisgd.broadcast(tensor, 0),
    "gather": lambda tensor: mpisgd.all_gather([ones() for _ in range(mpisgd.size())], tensor),
    "isend": lambda tensor: mpisgd.isend(tensor, mpisgd.rank()),
    "irecv": lambda tensor: mpisgd.irecv(tensor, mpisgd.rank()),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operation_is_refused_before_anything_is_sent(device, name):
    tensor = ones()
    mpisgd.all_reduce(tensor)
    gpu.synchronize()
    with raises_everywhere(mpisgd.InvalidArgument) as caught, gpu.graph(gpu.CUDAGraph()):
        CALLS[name](tensor)
    everyone("CUDA graph" in caught.text and "all_reduce_coalesced" in caught.text, caught.text)
    mine = ones()
    mpisgd.all_reduce(mine)  # the group goes on
    everyone(mine.tolist() == [mpisgd.size()] * 5)


@pytest.mark.parametrize("muted", [False, True])
def test_a_backward_that_is_captured_is_refused(device, muted):
    """A replay calls no hooks: its gradients would never be reduced, or those of before once more."""
    _, ours = pair()
    plain_step(ours, 0)
    ours.opt.zero_grad()
    gpu.synchronize()
    mute = ours.opt.no_sync() if muted else contextlib.nullcontext()
    with raises_everywhere(mpisgd.InvalidArgument) as caught, mute, gpu.graph(gpu.CUDAGraph()):
        ours.model(torch.ones(1, 4, device=DEVICE, dtype=torch.float64)).sum().backward()
    everyone("CUDA graph" in caught.text, caught.text)


def test_models_without_an_optimizer_of_ours_may_be_captured(device):
    model = mlp().double().to(DEVICE)
    gpu.synchronize()
    with gpu.graph(gpu.CUDAGraph()):
        model(torch.ones(1, 4, device=DEVICE, dtype=torch.float64)).sum().backward()


@pytest.mark.parametrize("device", ["nccl"], indirect=True)
def test_a_capture_goes_on_while_nccl_is_watched(device):
    """What is in flight is asked for meanwhile, which would end the capture from an ordinary thread."""
    side, tensor = gpu.Stream(), ones()
    model, inputs = mlp().double().to(DEVICE), torch.ones(1, 4, device=DEVICE, dtype=torch.float64)
    model(inputs)  # loads what must not be loaded in a capture
    mpisgd.all_reduce(ones())
    gpu.synchronize()
    with gpu.stream(side):
        gpu._sleep(CYCLES_PER_S)
        work = mpisgd.all_reduce(tensor, async_op=True)
    with gpu.graph(gpu.CUDAGraph()):
        model(inputs)
        time.sleep(3 * POLL_S)
    everyone(not side.query(), "nothing was in flight")
    work.wait()
    everyone(tensor.tolist() == [mpisgd.size()] * 5)
