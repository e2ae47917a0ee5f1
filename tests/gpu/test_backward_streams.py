"""Backward in several streams: a bucket is sent after the gradients of all of them."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_under_test import gpu
from harness import pair, sgd
from torch import Tensor, nn
from verdicts import everyone

import mpisgd
import mpisgd.horovod as hvd

pytestmark = pytest.mark.mpi(min_size=2)


class Branches(nn.Module):
    """Two layers, each of which computes in a stream of its own: so does its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        self.streams: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        streams = self.streams or [gpu.current_stream()] * 2
        outs = []
        for layer, stream in zip(self.layers, streams, strict=True):
            stream.wait_stream(gpu.current_stream())
            with gpu.stream(stream):
                outs.append(layer(inputs))
            gpu.current_stream().wait_stream(stream)
        return outs[0] * outs[1]


def check_steps(plain: Any, ours: Any) -> None:
    """A few steps of both, of which the second one computes in streams of its own."""
    ours.model.streams = [gpu.Stream(), gpu.Stream()]
    for step in range(3):
        for run in (plain, ours):
            run.opt.zero_grad()
            run.backward(step)
            run.opt.step()
    pairs = zip(plain.model.parameters(), ours.model.parameters(), strict=True)
    off = [float((a.detach() - b.detach()).abs().max()) for a, b in pairs]
    everyone(max(off) < 1e-11, f"{off}")


@pytest.mark.parametrize("strategy", [mpisgd.Synchronous(), mpisgd.Sharded(1), mpisgd.Sharded(2)], ids=str)
def test_a_bucket_has_the_gradients_of_all_streams(device, simulated, strategy):
    check_steps(*pair(model=Branches, strategy=strategy, overlap=True))


def test_a_bucket_of_horovod_has_them_too(device, simulated):
    plain, ours = pair(model=Branches)
    hvd.init()
    ours.opt = hvd.DistributedOptimizer(sgd(ours.model), named_parameters=ours.model.named_parameters())
    check_steps(plain, ours)
    hvd.shutdown()
