"""With `overlap_forward` each stream that computes a layer waits for the parameters of that layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_under_test import DEVICE, gpu
from torch import Tensor, nn
from verdicts import everyone

import mpisgd

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.parametrize("device", ["nccl"], indirect=True)]


class InTurns(nn.Module):
    """Two layers whose parameters arrive together, in streams of their own where there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.streams: list[Any] = []

    def forward(self, inputs: Tensor) -> list[Tensor]:
        outs = []
        current = gpu.current_stream()
        for layer, stream in zip(self.layers, self.streams or [current] * 2, strict=True):
            with gpu.stream(stream):
                outs.append(layer(inputs))
        return outs


def test_a_part_that_one_stream_has_waited_for_is_waited_for_by_others(device, simulated):
    torch.manual_seed(1)
    model = InTurns().to(DEVICE)
    mpisgd.broadcast_parameters(model)
    strategy = mpisgd.Sharded(1, overlap_forward=True)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy=strategy)
    inputs = torch.ones(1, 4, device=DEVICE)
    for _ in range(2):
        optimizer.zero_grad()
        sum(out.sum() for out in model(inputs)).backward()
        gpu.synchronize()
        before = [out.detach().sum().item() for out in model(inputs)]
        optimizer.step()
    model.streams = [gpu.Stream(), gpu.Stream()]
    for stream in model.streams:
        stream.wait_stream(gpu.current_stream())
    outs = [out.detach() for out in model(inputs)]
    found: list[float] = []
    for stream, out in reversed(list(zip(model.streams, outs, strict=True))):
        with gpu.stream(stream):  # which the first one need not have reached
            found.insert(0, out.sum().item())
    wanted = [total - 16.0 for total in before]  # each gradient is one, and so is the learning rate
    everyone(found == pytest.approx(wanted, abs=1e-4), f"{found}, {wanted}")
