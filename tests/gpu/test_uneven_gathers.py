"""Gathers of tensors whose sizes differ by rank stay on the GPU, where something takes them there."""

from __future__ import annotations

import pytest
import torch
from gpu_under_test import DEVICE, gpu
from late_tensors import CYCLES
from torch import Tensor
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd.collectives.all_gather import all_gather_ragged

DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64]


def rows(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rank r has 2 r rows; the first has none."""
    return (torch.arange(6 * rank) % 5 + rank).to(dtype).view(2 * rank, 3)


@pytest.fixture
def copies(simulated, monkeypatch) -> list[int]:
    """One entry for each copy between device and host."""
    made, real = [], simulated.copy
    monkeypatch.setattr(simulated, "copy", lambda *pair: (made.append(1), real(*pair)))
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_rows_are_gathered_where_they_lie(copies, expected_way, dtype):
    got = all_gather_ragged(rows(mpisgd.rank(), dtype).to(DEVICE))
    everyone(all(piece.device.type == DEVICE for piece in got))
    everyone(all(torch.equal(piece.cpu(), rows(rank, dtype)) for rank, piece in enumerate(got)), f"{got}")
    everyone(expected_way != "nccl" or not copies, f"{len(copies)} copies")


@pytest.mark.parametrize("async_op", [False, True])
def test_lists_of_unequal_tensors_are_gathered_where_they_lie(copies, expected_way, async_op):
    mine = rows(mpisgd.rank()).to(DEVICE)
    outputs = [torch.zeros(3, 2 * rank, device=DEVICE).t() for rank in range(mpisgd.size())]
    before = len(copies)
    work = mpisgd.all_gather(outputs, mine, async_op=async_op)
    if work is not None:
        work.wait()
    everyone(all(torch.equal(output.cpu(), rows(rank)) for rank, output in enumerate(outputs)), f"{outputs}")
    everyone(expected_way != "nccl" or len(copies) == before, f"{len(copies)} copies")


def test_what_is_gathered_may_lie_in_its_place():
    outputs = [torch.zeros(2 * rank, 3, device=DEVICE) for rank in range(mpisgd.size())]
    mine = outputs[mpisgd.rank()].copy_(rows(mpisgd.rank()))
    mpisgd.all_gather(outputs, mine)
    everyone(all(torch.equal(output.cpu(), rows(rank)) for rank, output in enumerate(outputs)))


def test_a_ragged_gather_comes_after_its_input_and_before_its_use(simulated):
    mine, side = torch.zeros(2, 3, device=DEVICE), gpu.Stream()
    gpu.synchronize()
    with gpu.stream(side):
        gpu._sleep(CYCLES)
        mine.fill_(mpisgd.rank() + 1.0)
        got = all_gather_ragged(mine)
        total = torch.stack(got).sum()
    side.synchronize()
    everyone(total.item() == 6 * mpisgd.size() * (mpisgd.size() + 1) / 2)


@pytest.mark.mpi(min_size=2)
def test_rows_of_other_shapes_are_a_mismatch():
    with raises_everywhere(mpisgd.CollectiveMismatch):
        all_gather_ragged(torch.ones(2, 3 + mpisgd.rank(), device=DEVICE))
