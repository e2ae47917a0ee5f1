"""Which transport large gradients take depends on the pages they lie in; what comes out does not."""

from __future__ import annotations

import pytest
import torch
from harness import FEATURES, check_equal_runs
from torch import nn
from verdicts import everyone

import mpisgd
from mpisgd import config
from mpisgd.collectives.all_reduce import transport_named
from mpisgd.compress import sum_reducer
from mpisgd.job.lifecycle import world
from mpisgd.transport.cma import transport
from mpisgd.transport.cma.transport import CmaTransport

WIDE = 40_000
LARGE_BYTES = WIDE * FEATURES * 8


def wide() -> nn.Module:
    """One gradient of LARGE_BYTES, and one of half as many."""
    return nn.Sequential(nn.Linear(FEATURES, WIDE, bias=False), nn.Tanh(), nn.Linear(WIDE, 2, bias=False))


def gentle(model: nn.Module) -> torch.optim.Optimizer:
    """So many features move the outputs a lot."""
    return torch.optim.SGD(model.parameters(), lr=1e-4)


@pytest.fixture
def direct(monkeypatch):
    """This rank's view of the others' memory, which all-reduces of any size choose."""
    cma = transport_named(world(), "direct")
    if cma is None:
        pytest.skip("one rank, several hosts, or ranks that cannot reach each other's memory")
    monkeypatch.setattr(sum_reducer, "choose_algorithm", lambda *_: "direct")
    monkeypatch.setattr(transport, "IN_HUGE_PAGES_BYTES", LARGE_BYTES)
    return cma


@pytest.mark.parametrize("large_pages", [True, False])
def test_large_gradients_are_reduced_where_they_lie_if_in_large_pages(direct, monkeypatch, large_pages):
    taken = []
    reachable_address = CmaTransport.reachable_address

    def noted(self: CmaTransport, flat):
        taken.append(flat.nbytes)
        return reachable_address(self, flat)

    monkeypatch.setattr(direct, "huge_pages", large_pages)
    monkeypatch.setattr(CmaTransport, "reachable_address", noted)
    check_equal_runs(model=wide, optimizer=gentle, steps=3)
    everyone(taken == [LARGE_BYTES] * 3 * large_pages)


def test_one_rank_without_them_keeps_all_from_it(direct, monkeypatch):
    monkeypatch.setattr(config, "huge_pages", lambda: mpisgd.rank() != 0)
    theirs = transport_named(mpisgd.new_group(), "direct")
    assert theirs is not None
    everyone(not theirs.huge_pages)
    monkeypatch.setattr(config, "huge_pages", lambda: True)
    ours = transport_named(mpisgd.new_group(), "direct")
    assert ours is not None
    everyone(ours.huge_pages)
