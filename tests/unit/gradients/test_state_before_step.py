"""A state that is saved in the middle of a step has what compressors have kept of it so far."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mpisgd
from mpisgd import compress
from mpisgd.job.threads_as_ranks import run_ranks

KEEPING = [
    compress.TopK(ratio=0.2),
    compress.DeepGradient(ratio=0.2, momentum=0.5),
    compress.OneBit(two_step=True),
    compress.PowerSGD(rank=1),
]
BEGINS = {
    "broadcast": lambda optimizer: mpisgd.broadcast_optimizer_state(optimizer, 1),
    "loaded of another rank": lambda optimizer: optimizer.load_state_dict(
        mpisgd.broadcast_object(optimizer.state_dict(), 1)
    ),
}


def trained(compression, begin, *, saves: bool):
    """Return weights after three steps; the state is saved and loaded between the first backward and a step.

    A bucket has been sent by then, so a part of its gradients is in the residuals alone.
    """
    net = nn.Linear(6, 4, bias=False, dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(torch.linspace(-1, 1, 24).view_as(net.weight))

    def made() -> torch.optim.Optimizer:
        return mpisgd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), compression=compression)

    optimizer = made()
    begin(optimizer)
    for step in range(3):
        factors = torch.cos(torch.arange(24.0, dtype=torch.float64) * (mpisgd.rank() + 2) + step)
        (net.weight * factors.view_as(net.weight)).sum().backward()
        if step == 0:
            state = copy.deepcopy(optimizer.state_dict())
            if saves:
                optimizer = made()
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.detach().clone()


@pytest.mark.parametrize("begin", BEGINS.values(), ids=BEGINS)
@pytest.mark.parametrize("compression", KEEPING, ids=str)
def test_what_is_kept_since_a_load_is_saved_before_the_next_step(compression, begin):
    for whole, resumed in run_ranks(
        3, lambda: [trained(compression, begin, saves=saves) for saves in (False, True)]
    ):
        assert torch.equal(whole, resumed)
