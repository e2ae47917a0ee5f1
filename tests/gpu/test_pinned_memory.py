"""Long tensors of a GPU go through a few pieces of pinned memory, whatever the operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from closed_form import given
from gpu_under_test import DEVICE
from torch import Tensor
from verdicts import everyone

import mpisgd
from mpisgd.accelerator import bounce_buffers, buffers

pytestmark = pytest.mark.parametrize("device", ["staging"], indirect=True)

PIECE = 64
N = 1000  # of float32: many pieces, and a part of one
MOST = 8 * PIECE  # pinned memory of an operation, beside the simulation's rounding


def cases() -> dict[str, tuple[Callable[..., Any], list[Tensor]]]:
    """Of each operation: what is called, and its tensors, the first of which is overwritten."""
    size, rank = mpisgd.size(), mpisgd.rank()
    mine, many = given(rank, torch.float32, (N,)), given(rank, torch.float32, (size * N,))
    return {
        "broadcast": (lambda x: mpisgd.broadcast(x, size - 1), [mine]),
        "reduce": (lambda x: mpisgd.reduce(x, 0), [mine]),
        "all_gather": (mpisgd.all_gather_into_tensor, [torch.zeros(size * N), mine]),
        "reduce_scatter": (mpisgd.reduce_scatter_tensor, [torch.zeros(N), many]),
        "all_to_all": (mpisgd.all_to_all_single, [torch.zeros(size * N), many]),
        "strided": (lambda x: mpisgd.broadcast(x.view(-1, 4).t(), size - 1), [mine]),
        "all_reduce": (lambda x: mpisgd.all_reduce(x, algorithm="mpi"), [mine]),
        "asynchronous": (lambda x: mpisgd.broadcast(x, 0, async_op=True).wait(), [mine]),
    }


NAMES = [
    *("broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "strided"),
    *("all_reduce", "asynchronous"),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", NAMES)
def test_no_operation_pins_a_whole_tensor(device, simulated, monkeypatch, name):
    monkeypatch.setattr(bounce_buffers, "CHUNK_BYTES", PIECE)
    monkeypatch.setattr("mpisgd.transport.device.chunked_pipeline.CHUNK_BYTES", PIECE)
    pinned, real = [], simulated.pinned
    monkeypatch.setattr(
        simulated, "pinned", lambda n, dtype: (pinned.append(n * dtype.itemsize), real(n, dtype))[1]
    )
    call, tensors = cases()[name]
    on_gpu = [tensor.to(DEVICE) for tensor in tensors]
    call(*tensors)
    before = simulated.device.allocator.reserved[None]
    call(*on_gpu)
    everyone(torch.equal(on_gpu[0].cpu(), tensors[0]), f"{on_gpu[0]}, {tensors[0]}")
    everyone(max(pinned) <= PIECE and sum(pinned) <= MOST, f"{pinned}")
    everyone(simulated.device.allocator.reserved[None] - before <= 8 * 512)


@pytest.mark.mpi(min_size=2)
def test_long_messages_go_by_pieces(device, simulated, monkeypatch):
    monkeypatch.setattr(bounce_buffers, "CHUNK_BYTES", PIECE)
    rank, size = mpisgd.rank(), mpisgd.size()
    place = torch.zeros(N, device=DEVICE)
    work = mpisgd.irecv(place, (rank - 1) % size)
    mpisgd.isend(given(rank, torch.float32, (N,)).to(DEVICE), (rank + 1) % size).wait()
    work.wait()
    everyone(torch.equal(place.cpu(), given((rank - 1) % size, torch.float32, (N,))))


def test_a_long_tensor_comes_late_and_is_used_later(device, simulated, monkeypatch):
    """The pieces keep the order of the stream."""
    monkeypatch.setattr(bounce_buffers, "CHUNK_BYTES", PIECE)
    tensor = torch.zeros(N, device=DEVICE)
    tensor += 1
    there = buffers.copy_to_host(tensor)
    everyone(bool((there == 1).all()))
    seen = torch.zeros(N, device=DEVICE)
    buffers.copy_to_device(torch.full((N,), 2.0), tensor)
    seen.copy_(tensor)
    everyone(bool((seen == 2).all()))
