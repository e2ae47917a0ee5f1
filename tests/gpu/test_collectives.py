"""Every collective on tensors of a GPU gives what it gives on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_under_test import DEVICE
from torch import Tensor

import mpisgd
from mpisgd import ReduceOp
from mpisgd.job.lifecycle import world
from mpisgd.transport.device import chunked_pipeline

N = 131
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64),
]


def given(dtype: torch.dtype, *shape: int) -> Tensor:
    """Differs by rank and element, and sums are exact, in 16-bit floats too."""
    numel = torch.Size(shape).numel()
    values = (torch.arange(numel) * 7 + mpisgd.rank() * 13) % 17 - 8
    return values.to(dtype).view(shape) if dtype is not torch.uint8 else values.abs().to(dtype).view(shape)


def check(call: Callable[..., Any], *tensors: Tensor) -> None:
    """Compare what `call` makes of tensors on the CPU and of their copies on the GPU."""
    on_gpu = [tensor.to(DEVICE) for tensor in tensors]
    call(*tensors)
    call(*on_gpu)
    for mine, theirs in zip(tensors, on_gpu, strict=True):
        torch.testing.assert_close(theirs.cpu(), mine, rtol=1e-6, atol=1e-6)


def test_it_goes_the_way_it_should(expected_way):
    mpisgd.all_reduce(torch.zeros(1, device=DEVICE))
    assert world().device is not None
    assert world().device.selection.name == expected_way


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions(dtype):
    size = mpisgd.size()
    ops = [ReduceOp.SUM, ReduceOp.PRODUCT]
    ops += [] if dtype is torch.bool else [ReduceOp.AVG]
    ops += [] if dtype.is_floating_point or dtype.is_complex else [ReduceOp.BXOR]
    ops += [] if dtype.is_complex else [ReduceOp.MIN, ReduceOp.MAX]
    for op in ops:
        check(lambda x, op=op: mpisgd.all_reduce(x, op), given(dtype, N))
        check(lambda x, op=op: mpisgd.reduce(x, size - 1, op), given(dtype, N))
        check(
            lambda out, x, op=op: mpisgd.reduce_scatter_tensor(out, x, op),
            torch.zeros(N, dtype=dtype),
            given(dtype, size * N),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_movements(dtype):
    size, rank = mpisgd.size(), mpisgd.rank()
    check(lambda x: mpisgd.broadcast(x, size - 1), given(dtype, N))
    check(mpisgd.all_gather_into_tensor, torch.zeros(size * N, dtype=dtype), given(dtype, N))
    check(lambda out, x: mpisgd.all_gather(list(out), x), torch.zeros(size, N, dtype=dtype), given(dtype, N))
    check(
        lambda out, x: mpisgd.gather(x, list(out) if rank == 0 else None),
        torch.zeros(size, N, dtype=dtype),
        given(dtype, N),
    )
    check(
        lambda x, many: mpisgd.scatter(x, list(many) if rank == 0 else None),
        torch.zeros(N, dtype=dtype),
        given(dtype, size, N),
    )
    check(mpisgd.all_to_all_single, torch.zeros(size * N, dtype=dtype), given(dtype, size * N))
    gives, takes = [rank + to for to in range(size)], [source + rank for source in range(size)]
    check(
        lambda out, x: mpisgd.all_to_all_single(out, x, takes, gives),
        torch.zeros(sum(takes), 3, dtype=dtype),
        given(dtype, sum(gives), 3),
    )


def test_layouts_lists_and_empty_tensors():
    check(lambda x: mpisgd.all_reduce(x.t()), given(torch.float32, 4, 6))
    check(lambda x: mpisgd.all_reduce(x[:, 0]), given(torch.float32, N, 2))
    check(mpisgd.all_reduce, given(torch.float32, 0))
    check(lambda *many: mpisgd.all_reduce_coalesced(many), given(torch.float32, 3), given(torch.int64, 2, 2))
    check(
        lambda *many: mpisgd.broadcast_coalesced(many, 0), given(torch.float32, 3), given(torch.bfloat16, 5)
    )


def test_a_long_tensor_goes_in_chunks():
    numel = 3 * chunked_pipeline.CHUNK_BYTES // 4 + 5
    mine = given(torch.float32, numel).to(DEVICE)
    wanted = given(torch.float32, numel)
    mpisgd.all_reduce(mine, algorithm="mpi")  # not by NCCL
    mpisgd.all_reduce(wanted, algorithm="mpi")
    assert torch.equal(mine.cpu(), wanted)


def test_asynchronous_operations():
    mine = [given(torch.float32, N + i).to(DEVICE) for i in range(3)]
    wanted = [given(torch.float32, N + i) for i in range(3)]
    works = [mpisgd.all_reduce(tensor, async_op=True) for tensor in mine]
    futures = [work.get_future() for work in works[1:]]
    for tensor in wanted:
        mpisgd.all_reduce(tensor)
    works[0].wait()
    for future in futures:
        future.wait()
    for a, b in zip(mine, wanted, strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.mpi(min_size=2)
def test_messages():
    rank, size = mpisgd.rank(), mpisgd.size()
    place = torch.zeros(N, device=DEVICE)
    receive = mpisgd.irecv(place, (rank - 1) % size, tag=3)
    mpisgd.isend(torch.full((N,), float(rank), device=DEVICE), (rank + 1) % size, tag=3).wait()
    receive.wait()
    assert (place == (rank - 1) % size).all()


def test_tensors_of_several_places_are_refused():
    with pytest.raises(mpisgd.UnsupportedTensor, match="all on one device"):
        mpisgd.all_gather_into_tensor(torch.zeros(mpisgd.size()), torch.zeros(1, device=DEVICE))
    mpisgd.barrier()
