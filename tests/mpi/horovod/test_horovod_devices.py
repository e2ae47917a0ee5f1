"""Horovod's operations on tensors of a pretended GPU: the numbers, and the order of the streams."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator

import pytest
import torch
from closed_form import given
from devices import EagerDevice, LateDevice
from joined_batch import check
from reductions import near
from verdicts import everyone

import mpisgd.horovod as hvd
from mpisgd.accelerator.runtime import set_runtime

pytestmark = pytest.mark.mpi(min_size=2)


class LateFloats(LateDevice):
    """On which float32 lies: not what the engine sends."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype is torch.float32


def engine_on(device: EagerDevice) -> Iterator[EagerDevice]:
    """Let Horovod begin anew on a device, and go back to the CPU afterwards."""
    hvd.shutdown()
    set_runtime(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that it goes through host memory
        hvd.init()
        yield device
        hvd.shutdown()
    set_runtime(None)
    hvd.init()


@pytest.fixture(scope="module", params=[False, True], ids=["host memory", "nccl"])
def device(request, horovod) -> Iterator[EagerDevice]:
    yield from engine_on(EagerDevice(nccl=request.param))


@pytest.fixture(scope="module")
def late(horovod) -> Iterator[LateDevice]:
    yield from engine_on(LateFloats())


def test_operations(device):
    rank, size = hvd.rank(), hvd.size()
    everyones = [given(r, torch.float32, (size, 2)) for r in range(size)]
    mine = everyones[rank].clone()
    near(hvd.allreduce(mine, op=hvd.Sum), sum(everyones))
    many = hvd.grouped_allreduce([mine, mine * 2, mine[0]], op=hvd.Average)
    near(many[1], sum(everyones) * 2 / size)
    near(many[2], sum(everyones)[0] / size)
    near(hvd.allgather(mine[: rank + 1]), torch.cat([x[: r + 1] for r, x in enumerate(everyones)]))
    near(hvd.broadcast(mine, size - 1), everyones[-1])
    near(hvd.reducescatter(mine, op=hvd.Sum), sum(everyones)[rank : rank + 1])
    near(hvd.alltoall(mine), torch.stack([x[rank] for x in everyones]))
    near(mine, everyones[rank])


def test_training(device):
    check()
    check(compression=hvd.Compression.bf16, tolerance=5e-2)


def test_join(device):
    if hvd.rank() < hvd.size() - 1:
        near(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), hvd.size() - 1.0))
        near(hvd.allreduce(torch.ones(3), op=hvd.Product), torch.ones(3))
    hvd.join()


def carried_out_by_the_engine(handle: int) -> torch.Tensor:
    """Its thread has another stream; one that waits would do it in its own."""
    deadline = time.monotonic() + 30
    while not hvd.poll(handle) and time.monotonic() < deadline:
        time.sleep(0.001)
    return hvd.synchronize(handle)


def test_what_is_produced_late_on_a_stream_of_the_program_is_waited_for(late):
    """And what uses the result there comes after it."""
    stream = late.new_stream()
    x, seen = torch.zeros(4), torch.zeros(4)
    with late.on(stream):
        late.kernel(lambda: x.fill_(1.0 + hvd.rank()))
        gathered = carried_out_by_the_engine(hvd.allgather_async(x[:1]))
        carried_out_by_the_engine(hvd.allreduce_async_(x, op=hvd.Max))
        late.kernel(lambda: seen.copy_(x))
    stream.synchronize()
    everyone(gathered.tolist() == [1.0 + rank for rank in range(hvd.size())], f"{gathered}")
    everyone(seen.tolist() == [float(hvd.size())] * 4, f"{seen}")
