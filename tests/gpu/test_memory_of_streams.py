"""Memory of one stream that another one still uses is not handed out meanwhile.

The simulated allocator hands freed memory out at once. So each test lets go of memory whose reader is queued
on a busy stream, takes memory of the same size on the stream that it belongs to, and fills that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_under_test import DEVICE, gpu
from torch import Tensor
from verdicts import everyone

import mpisgd
import mpisgd.horovod as hvd
from mpisgd import ReduceOp
from mpisgd.accelerator.runtime import runtime
from mpisgd.core.consistency import Operation
from mpisgd.job.lifecycle import world
from mpisgd.sharding.device_parts import DeviceParts
from mpisgd.transport.device import chunked_pipeline

N = 1000
CYCLES = 400_000_000  # about 0.2 s


def total() -> float:
    return mpisgd.size() * (mpisgd.size() + 1) / 2


def reuse(stream: Any, *, numel: int = N) -> list[Tensor]:
    """Fill memory of the size that was let go of, all that a stream has."""
    with gpu.stream(stream):
        taken = [torch.full((numel,), -1.0, device=DEVICE) for _ in range(8)]
    stream.synchronize()
    return taken


def test_packed_copies_are_kept_for_the_stream_that_unpacks_them(device):
    """The operation packs on one stream, and its results are unpacked on another one."""
    packs, unpacks = gpu.Stream(), gpu.Stream()
    strided = [torch.zeros(N, 2, device=DEVICE)[:, 1] for _ in range(2)]
    gpu.synchronize()
    with gpu.stream(packs):
        for tensor in strided:
            tensor.fill_(mpisgd.rank() + 1.0)
        work = mpisgd.all_reduce_coalesced(strided, async_op=True)
    with gpu.stream(unpacks):
        gpu._sleep(CYCLES)
        work.wait()
    del work
    taken = reuse(packs)
    unpacks.synchronize()
    for tensor in strided:
        everyone((tensor == total()).all().item(), f"{tensor[:3]}")
    everyone(all((tensor == -1.0).all().item() for tensor in taken), "written to when it was another's")


@pytest.mark.parametrize("columns", [1, 2])  # whose second one is packed
def test_a_tensor_is_kept_for_the_stream_that_waits_for_its_operation(device, columns):
    """The program lets go of it: what follows on the stream of the wait still reads it."""
    mine, other = gpu.Stream(), gpu.Stream()
    gpu.synchronize()
    with gpu.stream(mine):
        tensor = torch.full((N, columns), mpisgd.rank() + 1.0, device=DEVICE)[:, -1]
        work = mpisgd.all_reduce(tensor, async_op=True)
    with gpu.stream(other):
        work.wait()
        gpu._sleep(CYCLES)
        seen = tensor * 1
        if world().device.selection.name != "nccl":
            tensor.record_stream(gpu.current_stream())  # an operation of the host is over: a user's own duty
    del work, tensor
    taken = reuse(mine, numel=columns * N)
    other.synchronize()
    everyone((seen == total()).all().item(), f"{seen[:3]}")
    everyone(all((tensor == -1.0).all().item() for tensor in taken), "written to when it was another's")


@pytest.mark.parametrize("sizes", [(N, N), (2 * N, 10)], ids=["slices", "parts"])
def test_parts_are_kept_for_the_stream_that_takes_them(device, sizes):
    """Combined on one stream, and taken on another one."""
    mine, other = gpu.Stream(), gpu.Stream()
    sizes = [*sizes, *sizes][: mpisgd.size()]
    seen = torch.zeros(sizes[mpisgd.rank()], device=DEVICE)
    gpu.synchronize()
    with gpu.stream(mine):
        buffers = [[torch.full((n,), mpisgd.rank() + 1.0, device=DEVICE)] for n in sizes]
        parts = DeviceParts(buffers, world())
        operation = Operation("reduce_scatter")
        work = parts.reduce_scatter(ReduceOp.SUM, operation, torch.float32, lambda mine: seen.copy_(mine))
    with gpu.stream(other):
        gpu._sleep(CYCLES)
        work.wait()
    del work
    taken = [reuse(mine, numel=numel) for numel in {max(sizes), *sizes}]
    other.synchronize()
    everyone((seen == total()).all().item(), f"{seen[:3]}")
    del taken


@pytest.fixture
def horovod(device: Any) -> Any:
    hvd.init()
    hvd.allreduce(torch.zeros(1, device=DEVICE))
    yield
    hvd.shutdown()


def test_what_horovod_reads_is_kept_for_it(horovod):
    """Its thread has queued the copy of the input, and the program lets go of that."""
    mine = gpu.Stream()
    gpu.synchronize()
    gpu._sleep(CYCLES)  # on the default stream, which is that of Horovod's thread
    with gpu.stream(mine):
        tensor = torch.full((N,), mpisgd.rank() + 1.0, device=DEVICE)
        handle = hvd.allreduce_async(tensor, op=hvd.Sum)
        while not hvd.poll(handle):
            pass
    del tensor
    taken = reuse(mine)
    with gpu.stream(mine):
        result = hvd.synchronize(handle)
    mine.synchronize()
    everyone((result == total()).all().item(), f"{result[:3]}")
    del taken


def test_what_horovod_returns_is_kept_for_the_stream_that_uses_it(horovod):
    """Its thread has made the result, and makes the next one."""
    mine = gpu.Stream()
    gpu.synchronize()
    with gpu.stream(mine):
        handle = hvd.allgather_async(torch.full((N,), mpisgd.rank() + 1.0, device=DEVICE))
        while not hvd.poll(handle):  # a wait might do it in this thread
            pass
        result = hvd.synchronize(handle)
        gpu._sleep(CYCLES)
        seen = result.view(-1, N).sum(0)
        del result
    for _ in range(4):
        hvd.allgather(torch.full((N,), -1.0, device=DEVICE))
    gpu.current_stream().synchronize()
    mine.synchronize()
    everyone((seen == total()).all().item(), f"{seen[:3]}")


def test_an_operation_takes_no_further_stream(device, monkeypatch):
    """torch has 32 streams, and hands them out again: one of each call would be one of the program's soon."""
    monkeypatch.setattr(chunked_pipeline, "CHUNK_BYTES", 64)
    made, real = [], runtime().new_stream
    monkeypatch.setattr(runtime(), "new_stream", lambda place: (made.append(place), real(place))[1])
    peer, numbers = mpisgd.rank() ^ 1, []
    for _ in range(4):
        tensor = torch.ones(N, device=DEVICE)
        mpisgd.all_reduce(tensor, algorithm="mpi")  # in chunks
        work = mpisgd.all_reduce(tensor, async_op=True)
        work.get_future().wait()
        if peer < mpisgd.size():
            sent = mpisgd.isend(tensor, peer)
            mpisgd.recv(tensor, peer)
            sent.wait()
        numbers.append(len(made))
    everyone(len(set(numbers)) == 1, f"{numbers}")
