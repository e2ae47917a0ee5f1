"""What the tests of strategies have in common."""

from __future__ import annotations

import pytest

import mpisgd


@pytest.fixture(autouse=True)
def may_start_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests here start from other parameters on each rank, to see what becomes of them."""
    monkeypatch.setitem(mpisgd.DistributedOptimizer.__init__.__kwdefaults__, "check_start", False)
