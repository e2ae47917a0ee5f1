"""Every test of the optimizers runs twice: gradients fused and reduced at the end, and each on its own."""

from __future__ import annotations

import pytest
import torch
from verdicts import referee

import mpisgd
from mpisgd.gradients import plan
from mpisgd.job.lifecycle import world

WAYS = ("fused", "alone and overlapped")


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How gradients travel. The models here are small: `auto` would fuse everything."""
    if request.param == "alone and overlapped":
        monkeypatch.setattr(plan, "ALONE_BYTES", 5 * torch.float64.itemsize)
        monkeypatch.setitem(mpisgd.DistributedOptimizer.__init__.__kwdefaults__, "overlap", True)
    return str(request.param)


@pytest.fixture
def here() -> tuple[int, ...]:
    """The ranks of this host, where these share memory."""
    topology = world().topology
    if any(referee().allgather(world().transports.memory is None)):  # all ranks skip, or none
        pytest.skip("a rank that is alone on its host, or MPISGD_SHARED_MEMORY=0")
    return topology.nodes[topology.node_rank]
