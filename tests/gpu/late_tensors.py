"""Tensors that are filled late: what reads one without waiting for its stream sees zeros."""

from __future__ import annotations

from typing import Any

import torch
from gpu_under_test import DEVICE, gpu
from torch import Tensor

import mpisgd

__all__ = ["CYCLES", "N", "late_ones", "total"]

N = 1000
CYCLES = 200_000_000  # about 0.1 s


def late_ones(stream: Any) -> Tensor:
    """A tensor that gets this rank's number plus one long after this has returned; `stream` knows when."""
    tensor = torch.zeros(N, device=DEVICE)
    gpu.synchronize()
    with gpu.stream(stream):
        gpu._sleep(CYCLES)
        tensor.fill_(mpisgd.rank() + 1.0)
    return tensor


def total() -> float:
    """The sum of these over the ranks."""
    return mpisgd.size() * (mpisgd.size() + 1) / 2
