"""A model on the CPU and on several GPUs of each rank trains as one process trains it."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_under_test import DEVICE, gpu
from harness import ADAM_DRIFT, adam, check_equal_runs, pair, plain_step
from simulated_gpu.nccl import SimulatedNccl
from torch import Tensor, nn
from verdicts import everyone, raises_everywhere, referee, same_on_all_ranks

import mpisgd
from mpisgd.gradients.launcher import BucketLauncher
from mpisgd.job.groups import close_group
from mpisgd.job.lifecycle import current_job

STEPS = 6
LATE_S = 3.0


def own_gpus() -> list[torch.device]:
    """Two GPUs that no other rank of the host has."""
    first = 2 * mpisgd.local_rank()
    if gpu.device_count() < 2 * mpisgd.local_size():
        pytest.skip("needs two GPUs for each rank")
    return [torch.device(DEVICE, first), torch.device(DEVICE, first + 1)]


def first_and_further() -> list[torch.device]:
    """The GPU that `group` has been used on, and another of this rank's own."""
    first, further = mpisgd.local_rank(), mpisgd.local_rank() + mpisgd.local_size()
    own_gpus()
    return [torch.device(DEVICE, first), torch.device(DEVICE, further)]


class Spread(nn.Module):
    """A part on the CPU, and one on each of two GPUs, that backward reaches at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(3)
        )

    def spread(self) -> nn.Module:
        for part, place in zip(self.parts, ("cpu", *own_gpus()), strict=True):
            part.to(place)
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        outs = [part(inputs.to(part[0].weight.device)) for part in self.parts]
        return outs[0].to(inputs.device) + outs[1].to(inputs.device) * outs[2].to(inputs.device)


HOW: dict[str, Any] = {"model": Spread, "prepare": Spread.spread}


# Each two of how gradients travel, `overlap` and the size of buckets meet once.
OF_EACH_PAIR = (("nccl", None, 64), ("nccl", True, 2**20), ("staging", True, 64), ("staging", None, 2**20))


@pytest.mark.parametrize(
    ("device", "overlap", "cap"),
    [
        pytest.param(*case, marks=() if case in OF_EACH_PAIR else pytest.mark.long)
        for case in itertools.product(("nccl", "staging"), [None, True], [64, 2**20])
    ],
    indirect=["device"],
)
def test_the_training_equals_that_of_one_process(device, overlap, cap):
    check_equal_runs(steps=STEPS, overlap=overlap, bucket_cap_bytes=cap, **HOW)


def test_steps_with_an_optimizer_that_has_state(device):
    check_equal_runs(steps=STEPS, optimizer=adam, tol=ADAM_DRIFT, **HOW)


@pytest.mark.mpi(min_size=2)
def test_one_thread_at_a_time_launches_buckets(device, monkeypatch):
    """Autograd has a thread for each device, and each of them finds buckets complete."""
    real, inside, most, threads = BucketLauncher.launch, [0], [0], set()
    ours_alone = threading.Lock()

    def launch(self: Any, in_flight: Any, place: int) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threads.add(threading.get_ident())
        time.sleep(0.02)  # the others have their gradients meanwhile
        with ours_alone:  # what is sent twice would keep the other ranks waiting
            if place not in in_flight.launched:
                real(self, in_flight, place)
        inside[0] -= 1

    monkeypatch.setattr(BucketLauncher, "launch", launch)
    _, ours = pair(overlap=True, bucket_cap_bytes=64, **HOW)
    for step in range(6):
        plain_step(ours, step)
    everyone(most[0] == 1, f"{most[0]} threads at a time")
    assert any(referee().allgather(len(threads) > 1)), "all launched by one thread: shows nothing"


# -- a rank that cannot be connected -------------------------------------------------------------------


@pytest.fixture
def rank_one_fails(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether rank 1 fails to connect; it comes to the others when they have long heard of that."""
    fails, real = [False], SimulatedNccl.eager_connect_single_device

    def connect(self: SimulatedNccl, device: torch.device) -> None:
        if fails[0] and mpisgd.rank() == 1:
            threading.Timer(LATE_S, real, (self, device)).start()
            raise dist.DistBackendError("no memory left for the rings")
        real(self, device)

    monkeypatch.setattr(SimulatedNccl, "eager_connect_single_device", connect)
    return fails


def refused(tensor: Tensor, group: Any) -> None:
    """Every rank gets the error of rank 1, and soon."""
    began_s = time.monotonic()
    with raises_everywhere(mpisgd.NcclFailed) as caught:
        mpisgd.all_reduce(tensor, group=group)
    same_on_all_ranks(caught.text)
    everyone("rank 1: no memory left for the rings" in caught.text, caught.text)
    everyone(time.monotonic() - began_s < LATE_S, "it was waited for inside NCCL")


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_connect_a_further_gpu_is_an_error_on_every_rank(rank_one_fails, group):
    """The others hung inside NCCL, at the operation itself."""
    total, places = mpisgd.size() * (mpisgd.size() + 1) / 2, first_and_further()
    rank_one_fails[0] = True
    refused(torch.ones(3, device=places[1]), group)
    everyone(group.device is None)
    rank_one_fails[0] = False
    for place in places:  # the group begins anew
        tensor = torch.full((3,), mpisgd.rank() + 1.0, device=place)
        mpisgd.all_reduce(tensor, group=group)
        everyone(tensor.tolist() == [total] * 3)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_connect_its_first_gpu_is_one_too(rank_one_fails, idle_world, monkeypatch):
    monkeypatch.setattr(current_job(), "gpu", "nccl")
    made = mpisgd.new_group()
    rank_one_fails[0] = True
    refused(torch.ones(3, device=f"{DEVICE}:{mpisgd.local_rank()}"), made)
    rank_one_fails[0] = False
    close_group(made)


@pytest.mark.mpi(min_size=2)
def test_a_further_gpu_is_connected_before_its_first_operation(group, monkeypatch):
    """Not by it: there NCCL would keep the host of whoever waits for a rank."""
    connected, real = [], SimulatedNccl._launch

    def launch(self: SimulatedNccl, name: str, tensors: Any, *rest: Any) -> Any:
        connected.append(tensors[0].device.index in self._communicators)
        return real(self, name, tensors, *rest)

    monkeypatch.setattr(SimulatedNccl, "_launch", launch)
    mpisgd.all_reduce(torch.ones(3, device=first_and_further()[1]), group=group)
    everyone(connected == [True], f"{connected}")


# -- what ranks share ---------------------------------------------------------------------------------


def common_gpu() -> torch.device:
    """One that all ranks of the host take."""
    if gpu.device_count() <= mpisgd.local_size():
        pytest.skip("needs one GPU more than there are ranks")
    return torch.device(DEVICE, gpu.device_count() - 1)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose tensors have travelled on a GPU of each rank's own."""
    monkeypatch.setattr(current_job(), "gpu", "nccl")
    made = mpisgd.new_group()
    mpisgd.all_reduce(torch.ones(3, device=f"{DEVICE}:{mpisgd.local_rank()}"), group=made)
    yield made
    close_group(made)


@pytest.mark.mpi(min_size=2)
def test_a_second_gpu_that_ranks_share_is_refused_on_every_rank(group):
    tensor = torch.ones(3, device=common_gpu())
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.all_reduce(tensor, group=group)
    same_on_all_ranks(caught.text)
    everyone("share one GPU" in caught.text, caught.text)
    own = torch.ones(3, device=f"{DEVICE}:{mpisgd.local_rank()}")
    mpisgd.all_reduce(own, group=group)  # the group goes on
    everyone(own.tolist() == [group.size] * 3)


@pytest.mark.mpi(min_size=2)
def test_a_gpu_that_another_rank_works_on_is_refused(group):
    """Each rank alone on its GPU in each of two communicators, which would wait for each other."""
    other = torch.ones(3, device=f"{DEVICE}:{(mpisgd.local_rank() + 1) % mpisgd.local_size()}")
    with raises_everywhere(mpisgd.InvalidArgument):
        mpisgd.all_reduce(other, group=group)


@pytest.mark.mpi(min_size=2)
def test_where_nccl_is_no_must_all_go_through_host_memory_from_then_on(group, monkeypatch):
    monkeypatch.setattr(current_job(), "gpu", "auto")
    places = [common_gpu(), torch.device(DEVICE, mpisgd.local_rank())]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for place in places:
            tensor = torch.full((3,), mpisgd.rank() + 1.0, device=place)
            mpisgd.all_reduce(tensor, group=group)
            everyone(tensor.tolist() == [mpisgd.size() * (mpisgd.size() + 1) / 2] * 3)
    everyone(group.device.selection.name == "pinned host memory")


@pytest.mark.mpi(min_size=2)
def test_a_second_gpu_of_one_rank_alone_is_a_mismatch(group):
    """NCCL would wait for the others."""
    place = common_gpu() if mpisgd.rank() == 0 else torch.device(DEVICE, mpisgd.local_rank())
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.all_reduce(torch.ones(3, device=place), group=group)
        mpisgd.barrier(group)
    everyone("GPU number 2" in caught.text, caught.text)
