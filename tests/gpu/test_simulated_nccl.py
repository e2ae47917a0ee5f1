"""The simulated NCCL does what torch's does: an operation begins at its place in a stream, and ends later."""

from __future__ import annotations

import datetime
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_under_test import DEVICE, IS_SIMULATED, gpu
from simulated_gpu.nccl import CLEAN_UP_ONLY, SimulatedNccl
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from verdicts import everyone, referee

import mpisgd
from mpisgd.accelerator.runtime import runtime
from mpisgd.job.lifecycle import world
from mpisgd.transport.tcp_store.store import open_store

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(not IS_SIMULATED, reason="looks into the simulated device"),
]

LIMIT_S = 0.5


@pytest.fixture
def opened(simulated: Any) -> Iterator[Callable[..., SimulatedNccl]]:
    """Open a communicator of all ranks, with a timeout; those that are not ended are aborted."""
    queue, made = world().queue, []

    def open_one(timeout_s: float = 60.0) -> SimulatedNccl:
        store = open_store(queue.communicator, world().topology, 60.0)
        options = runtime().nccl_options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        store = PrefixStore(f"{len(made)}", store)
        made.append(runtime().make_nccl(store, mpisgd.rank(), mpisgd.size(), options))
        made[-1].mode = CLEAN_UP_ONLY
        made[-1].eager_connect_single_device(torch.device(DEVICE, gpu.current_device()))
        return made[-1]

    yield open_one
    referee().barrier()
    for each in made:
        each.abort()


def mine() -> Tensor:
    return torch.full((4,), mpisgd.rank() + 1.0, device=DEVICE)


def total() -> float:
    return mpisgd.size() * (mpisgd.size() + 1) / 2


def reached(event: Any, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not event.query() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(event.query())


def test_an_operation_is_launched_at_once_and_is_done_when_its_stream_has_come_to_it(opened):
    nccl, tensor, other = opened(), mine(), gpu.Stream()
    gpu.synchronize()
    tensor *= 10  # in the queue, too
    work = nccl.allreduce([tensor], dist.ReduceOp.SUM)
    everyone(not work.is_completed())
    with gpu.stream(other):
        early = tensor * 1
    other.synchronize()
    everyone((early == mpisgd.rank() + 1).all().item(), "the other stream has waited")
    work.wait()
    everyone(not work.is_completed(), "the host has waited")
    everyone((tensor == 10 * total()).all().item(), f"{tensor}")


def test_a_future_is_there_at_the_launch_and_carries_the_stream(opened):
    nccl, tensor, other = opened(), mine(), gpu.Stream()
    gpu.synchronize()
    future = nccl.allreduce([tensor], dist.ReduceOp.SUM).get_future()
    everyone(future.done())
    with gpu.stream(other):
        seen = future.wait()[0] * 1
    other.synchronize()
    everyone((seen == total()).all().item(), f"{seen}")


def test_the_gpu_waits_for_a_rank_that_does_not_come(opened, simulated):
    simulated.device.streams.latency_s = 0.0
    nccl, tensor = opened(), mine()
    first = mpisgd.rank() == 0
    if first:
        nccl.allreduce([tensor], dist.ReduceOp.SUM).wait()
    event = gpu.current_stream().record_event()
    everyone(reached(event, LIMIT_S) is not first)
    if not first:
        nccl.allreduce([tensor], dist.ReduceOp.SUM).wait()
    everyone((tensor == total()).all().item(), f"{tensor}")


def test_an_abort_lets_the_gpu_go_on_and_nothing_is_launched_any_more(opened):
    nccl, tensor = opened(), mine()
    if mpisgd.rank() == 0:
        nccl.allreduce([tensor], dist.ReduceOp.SUM).wait()
    nccl.abort()
    tensor.sum().item()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        nccl.allreduce([tensor], dist.ReduceOp.SUM)


def test_the_watchdog_ends_what_lasts_too_long_since_its_launch(opened):
    nccl, tensor = opened(timeout_s=LIMIT_S), mine()
    if mpisgd.rank() == 0:
        work, began_s = nccl.allreduce([tensor], dist.ReduceOp.SUM), time.monotonic()
        work.wait()
        tensor.sum().item()
        assert LIMIT_S / 2 < time.monotonic() - began_s < 20 * LIMIT_S
        with pytest.raises(dist.DistBackendError, match="timeout"):
            work.wait()
    everyone((nccl.ended == "abort") == (mpisgd.rank() == 0), nccl.ended)


def test_a_wait_with_a_limit_ends_the_communicator(opened):
    nccl, tensor = opened(), mine()
    if mpisgd.rank() == 0:
        work = nccl.allreduce([tensor], dist.ReduceOp.SUM)
        with pytest.raises(dist.DistBackendError, match="timed out"):
            work.wait(datetime.timedelta(seconds=0.1))
    everyone((nccl.ended == "abort") == (mpisgd.rank() == 0), nccl.ended)


BUSY = """
import datetime, time, torch, torch.distributed as dist
from simulated_gpu.device import install
from simulated_gpu.nccl import NcclOptions, SimulatedNccl
device, options = install(), NcclOptions()
options._timeout = datetime.timedelta(seconds=0.2)
nccl = SimulatedNccl(device, dist.HashStore(), 0, 1, options)
device.sleep(60.0)
nccl.allreduce([torch.ones(4, device="simgpu")], dist.ReduceOp.SUM)
time.sleep(30.0)
"""


def test_by_default_the_watchdog_ends_the_process():
    if mpisgd.rank() == 0:
        path = ":".join(filter(None, sys.path))
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}.split(':')\n{BUSY}"]
        )
        assert done.returncode == -signal.SIGABRT
    referee().barrier()
