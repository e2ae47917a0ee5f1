"""Every test of the optimizers runs twice: gradients fused and reduced at the end, and each on its own."""

from __future__ import annotations

import pytest
from harness import let_some_travel_alone
from ranks_as_threads import PerRank
from verdicts import referee

import mpisgd
from mpisgd.job.lifecycle import world
from mpisgd.transport import staging_layout

WAYS = ("fused", "alone and overlapped")


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How gradients travel. The models here are small: `auto` would fuse everything."""
    if request.param == "alone and overlapped":
        let_some_travel_alone(monkeypatch)
        monkeypatch.setitem(mpisgd.DistributedOptimizer.__init__.__kwdefaults__, "overlap", True)
    return str(request.param)


@pytest.fixture(params=["fused", "cut"])
def pieces(request: pytest.FixtureRequest, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How parameters are divided: as they are large here, or into pieces of 8 numbers, through tensors."""
    if request.param == "cut":
        if way != "fused":
            pytest.skip("the same as with larger pieces")
        let_some_travel_alone(monkeypatch)
        monkeypatch.setattr(staging_layout, "BUFFER_BYTES", 64 * mpisgd.size())


def ranks_of_this_host() -> tuple[int, ...]:
    topology = world().topology
    if any(referee().allgather(world().host_memory is None)):  # all ranks skip, or none
        pytest.skip("a rank that is alone on its host, or MPISGD_SHARED_MEMORY=0")
    return topology.nodes[topology.node_rank]


@pytest.fixture
def here(request: pytest.FixtureRequest) -> tuple[int, ...] | PerRank:
    """The ranks of this host, where these share memory."""
    return PerRank(ranks_of_this_host) if request.config.getoption("--threads") else ranks_of_this_host()
