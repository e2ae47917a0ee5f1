"""By NCCL a rank that does not come is an error of ours on the others, whatever their hosts wait for."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from gpu_under_test import DEVICE
from simulated_gpu.nccl import CLEAN_UP_ONLY
from torch import Tensor
from torch._C._distributed_c10d import ErrorType
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd.core.consistency import Operation
from mpisgd.errors import PeerLost
from mpisgd.job.groups import close_group, open_group
from mpisgd.job.lifecycle import current_job
from mpisgd.threads import waiting
from mpisgd.transport.device.transport import device_transport

pytestmark = pytest.mark.mpi(min_size=2)

LIMIT_S = 1.0
LOST = "rank 1 of the job was lost: killed, or out of reach"


@pytest.fixture
def group(simulated, expected_way) -> Iterator[mpisgd.Group]:
    """One whose NCCL the ranks have found each other by; its timeout is short."""
    if expected_way != "nccl":
        pytest.skip("without NCCL the host waits, and is woken by other means")
    made = open_group(current_job(), range(mpisgd.size()), name="short", timeout_s=LIMIT_S)
    mpisgd.all_reduce(ones(), group=made)
    yield made
    if made in current_job().groups:
        close_group(made)


def ones() -> Tensor:
    return torch.ones(4, device=DEVICE)


def alone(group: mpisgd.Group) -> Tensor:
    """What rank 0 has given to an operation that nobody else comes to."""
    tensor = ones()
    if group.rank == 0:
        mpisgd.all_reduce(tensor, group=group)
    return tensor


def in_a_moment(call: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.3, call)
    timer.start()
    return timer


@pytest.mark.parametrize(
    "wait", [lambda x: x.sum().item(), lambda x: torch.get_device_module(DEVICE).synchronize()]
)
def test_a_host_that_waits_for_the_gpu_is_woken_when_a_rank_is_lost(idle_world, group, wait):
    """As the failure detector tells it, on a thread of its own."""
    tensor, began_s = alone(group), time.monotonic()
    timer = in_a_moment(lambda: waiting.cancel_all(PeerLost(LOST)))
    wait(tensor)
    timer.join()
    took_s = time.monotonic() - began_s
    failed: list[BaseException | None] = []
    try:
        mpisgd.all_reduce(tensor, group=group)
    except mpisgd.MpisgdError as exc:
        failed.append(exc)
    waiting.allow_waits()
    everyone(took_s < LIMIT_S, f"{took_s}")
    everyone(group.rank != 0 or (type(failed[0]) is PeerLost and LOST in str(failed[0])), f"{failed}")


def test_a_group_that_is_abandoned_ends_its_nccl(group):
    tensor, began_s = ones(), time.monotonic()
    work = mpisgd.all_reduce(tensor, group=group, async_op=True) if group.rank == 0 else None
    current_job().groups.remove(group)
    timer = in_a_moment(lambda: group.abandon(LOST))
    if work is not None:
        work.wait()
    tensor.sum().item()
    timer.join()
    everyone(time.monotonic() - began_s < LIMIT_S)
    with raises_everywhere(PeerLost):
        mpisgd.all_reduce(tensor, group=group)
    if work is not None:
        with pytest.raises(PeerLost, match="rank 1 of the job was lost"):
            work.wait()
        with pytest.raises(PeerLost, match="rank 1 of the job was lost"):
            work.wait(timeout_s=5.0)


def fails_by_timeout(group: mpisgd.Group, tensor: Tensor) -> None:
    """The host of rank 0 is woken at the timeout, and the next operation there says for whom it waited."""
    began_s = time.monotonic()
    tensor.sum().item()
    took_s = time.monotonic() - began_s
    everyone(group.rank != 0 or LIMIT_S / 2 < took_s < 4 * LIMIT_S, f"{took_s}")
    failed = ""
    if group.rank == 0:
        with pytest.raises(mpisgd.CollectiveTimeout) as caught:
            mpisgd.all_reduce(tensor, group=group)
        failed = str(caught.value)
    everyone(group.rank != 0 or ("rank 1" in failed and "all_reduce" in failed), failed)


def test_what_lasts_too_long_is_an_error_of_ours_and_names_the_rank(group):
    """torch's own watchdog ended the process."""
    fails_by_timeout(group, alone(group))


def test_a_rank_that_stops_after_nccl_was_opened_is_reported_by_us(simulated, expected_way):
    """The communicator was made by its first operation, outside of every check, with the host inside NCCL."""
    if expected_way != "nccl":
        pytest.skip("no communicator")
    made = open_group(current_job(), range(mpisgd.size()), name="short", timeout_s=LIMIT_S)
    device_transport(made, ones(), Operation("all_reduce"), "nccl")
    began_s = time.monotonic()
    tensor = alone(made)
    took_s = time.monotonic() - began_s
    everyone(took_s < LIMIT_S / 2, f"{took_s}")
    fails_by_timeout(made, tensor)
    close_group(made)


def test_an_error_of_nccl_ends_it(group, simulated):
    """Such as a connection that has broken; unless a lost rank explains it."""
    simulated.opened[-1].error = ErrorType.COMM_ERROR
    tensor = alone(group)
    tensor.sum().item()
    threading.Event().wait(1.5)
    with raises_everywhere(mpisgd.NcclFailed):
        mpisgd.all_reduce(tensor, group=group)


def test_torch_never_ends_the_process_for_our_nccl_and_other_process_groups_are_as_they_were(
    group, simulated
):
    everyone(simulated.opened[-1].mode == CLEAN_UP_ONLY)
    everyone(not [name for name in os.environ if name.startswith("TORCH_NCCL")])


def test_abort_of_a_process_group_ends_its_nccl(simulated, expected_way):
    """As torch's own: a host that waits for the GPU goes on."""
    if expected_way != "nccl":
        pytest.skip("no communicator")
    dist.init_process_group("mpisgd", timeout=datetime.timedelta(seconds=5 * LIMIT_S))
    tensor = ones()
    dist.all_reduce(tensor)
    if mpisgd.rank() == 0:
        dist.all_reduce(tensor)
    timer, began_s = in_a_moment(dist.group.WORLD.abort), time.monotonic()
    tensor.sum().item()
    timer.join()
    everyone(time.monotonic() - began_s < LIMIT_S)
    with raises_everywhere(mpisgd.NotInitialized):
        dist.all_reduce(tensor)
    dist.destroy_process_group()
