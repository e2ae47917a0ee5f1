"""Every test of the optimizers runs twice: gradients fused and reduced at the end, and each on its own."""

from __future__ import annotations

import pytest
import torch

import mpisgd
from mpisgd.optim import plan

WAYS = ("fused", "alone and overlapped")


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How gradients travel. The models here are small: `auto` would fuse everything."""
    if request.param == "alone and overlapped":
        monkeypatch.setattr(plan, "ALONE_BYTES", 5 * torch.float64.itemsize)
        monkeypatch.setitem(mpisgd.DistributedOptimizer.__init__.__kwdefaults__, "overlap", True)
    return str(request.param)
