"""What carries tensors of a GPU: how it is chosen, what it takes, and what the ranks are told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from gpu_under_test import DEVICE
from simulated_gpu.runtime import SimulatedGpu
from torch import Tensor
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import ReduceOp
from mpisgd.accelerator.runtime import runtime, set_runtime
from mpisgd.job.groups import close_group
from mpisgd.job.lifecycle import current_job
from mpisgd.transport.device import selection
from mpisgd.transport.device import transport as device_transport
from mpisgd.transport.mpi.communicator import Communicator

TRANSPORTS = {"pinned host memory": "mpi", "nccl": "nccl", "cuda-aware mpi": "mpi"}


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(*shape, device=DEVICE, **options)


@pytest.fixture(autouse=True)
def nothing_to_split(idle_world) -> None:
    """Every group chooses for itself."""


@pytest.fixture
def only(request, simulated) -> Any:
    """A simulated device of another kind, during one test."""
    set_runtime(SimulatedGpu(**request.param))
    yield runtime()
    set_runtime(simulated)


def opened(wanted: str) -> mpisgd.Group:
    """A group on which a first tensor of the GPU has travelled."""
    group = mpisgd.new_group()
    before, current_job().gpu = current_job().gpu, wanted
    try:
        mpisgd.all_reduce(ones(1), group=group)
    finally:
        current_job().gpu = before
    return group


@pytest.fixture(params=TRANSPORTS)
def group(request, simulated, monkeypatch) -> Any:
    monkeypatch.setattr(device_transport, "is_cuda_aware", lambda: request.param == "cuda-aware mpi")
    made = opened(TRANSPORTS[request.param])
    assert made.device.selection.name == request.param
    yield made
    close_group(made)


@pytest.mark.mpi(min_size=2)
def test_messages_keep_their_tags(group):
    """Both send before they receive, and take the second message first: NCCL would wait for ever."""
    peer = mpisgd.rank() ^ 1
    if peer < mpisgd.size():
        works = [
            mpisgd.isend(
                torch.full((4,), device=DEVICE, fill_value=10.0 * mpisgd.rank() + tag), peer, group, tag
            )
            for tag in (1, 2)
        ]
        got = {tag: torch.zeros(8, device=DEVICE)[::2] for tag in (2, 1)}
        for tag, tensor in got.items():
            assert mpisgd.recv(tensor, peer, group, tag) == peer
            assert tensor.tolist() == [10.0 * peer + tag] * 4
        for work in works:
            work.wait()


def test_every_transport_takes_what_it_should(group, simulated, monkeypatch):
    """By the calls that reach NCCL, and by the copies: a test that all transports pass shows nothing."""
    copies, real = [], simulated.copy
    monkeypatch.setattr(simulated, "copy", lambda *pair: (copies.append(1), real(*pair)))
    calls = [len(inner.calls) for inner in simulated.opened]
    mpisgd.all_reduce(ones(5), group=group)
    mpisgd.all_gather_into_tensor(
        torch.zeros(group.size * 5, dtype=torch.int16, device=DEVICE), ones(5, dtype=torch.int16), group
    )
    called = [call for inner, n in zip(simulated.opened, calls, strict=True) for call in inner.calls[n:]]
    if group.device.selection.name == "nccl":
        everyone((len(copies), called) == (0, ["allreduce", "all_gather"]), f"{copies} {called}")
    elif group.device.selection.name == "cuda-aware mpi":
        everyone((len(copies), called) == (0, []), f"{copies} {called}")
    else:
        everyone((len(copies), called) == (4, []), f"{copies} {called}")
    before = len(copies)
    mpisgd.all_reduce(ones(5, dtype=torch.int16), ReduceOp.BXOR, group)  # nobody but us has that
    everyone(len(copies) == before + 2)


def test_objects_and_barriers_know_nothing_of_devices(group):
    everyone(mpisgd.broadcast_object({"rank": mpisgd.rank()}, 0, group) == {"rank": 0})
    mpisgd.barrier(group)


# -- how it is chosen -----------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("only", [{"shared": True}], indirect=True)
def test_ranks_that_share_a_gpu_are_staged_with_one_warning(only, monkeypatch):
    monkeypatch.setattr(selection, "_warned", False)
    monkeypatch.setattr(current_job(), "gpu", "auto")
    group = mpisgd.new_group()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mpisgd.all_reduce(torch.zeros(3, device=DEVICE), group=group)
        mpisgd.all_reduce(torch.zeros(4, device=DEVICE), group=group)
    everyone(group.device.selection.name == "pinned host memory")
    everyone(len(seen) == (group.rank == 0), f"{[str(one.message) for one in seen]}")
    if group.rank == 0:
        assert "share one GPU of host" in str(seen[0].message)
        assert "ranks 0, 1" in str(seen[0].message)
    close_group(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("only", [{"shared": True}, {"nccl": False}], indirect=True, ids=str)
def test_nccl_that_cannot_be_is_an_error_on_every_rank_and_the_group_lives(only, monkeypatch):
    group = mpisgd.new_group()
    monkeypatch.setattr(current_job(), "gpu", "nccl")
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.all_reduce(torch.zeros(3, device=DEVICE), group=group)
    same_on_all_ranks(caught.text)
    assert "share one GPU" in caught.text or "has no NCCL" in caught.text
    monkeypatch.setattr(current_job(), "gpu", "mpi")
    mine = ones(3)
    mpisgd.all_reduce(mine, group=group)
    everyone(mine.tolist() == [group.size] * 3)
    close_group(group)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_took_different_transports_are_told_at_the_next_check(simulated, monkeypatch):
    """NCCL meets nobody: what the ranks did is compared when they next meet, and then they begin anew."""
    monkeypatch.setattr(current_job(), "gpu", "nccl")
    group = opened("nccl")
    first = simulated.opened[-1]
    if group.rank == 0:
        group.device.backend.inner.allreduce = lambda tensors, op: None  # it would wait for the others
    mine = ones(3 if group.rank == 0 else 4)
    if group.rank == 0:
        mpisgd.all_reduce(mine, group=group)
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.barrier(group)
    everyone("operation" in caught.text)
    everyone(first.ended == "abort")
    mine = ones(3)
    mpisgd.all_reduce(mine, group=group)
    everyone(mine.tolist() == [group.size] * 3)
    everyone(simulated.opened[-1] is not first)
    close_group(group)
    everyone(simulated.opened[-1].ended == "shutdown")


@pytest.mark.mpi(min_size=2)
def test_nccl_keeps_its_place_between_asynchronous_operations(simulated):
    """The queue's thread is at work on others when NCCL's are called: the history must not depend on that."""
    group = opened("nccl")
    for i in range(20):
        works = [
            mpisgd.all_reduce(ones(1000, dtype=torch.int16), ReduceOp.BXOR, group, async_op=True)
            for _ in range(i % 3)
        ]
        mine = ones(5)
        mpisgd.all_reduce(mine, group=group)
        everyone(mine.tolist() == [group.size] * 5)
        for work in works:
            work.wait()
    mpisgd.barrier(group)
    close_group(group)


@pytest.mark.mpi(min_size=2)
def test_a_tensor_on_the_cpu_here_and_on_a_gpu_there_is_a_mismatch(simulated):
    group = mpisgd.new_group()
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.all_reduce(ones(3) if mpisgd.rank() == 0 else torch.ones(3), group=group)
    everyone(f"first on {DEVICE}" in caught.text and "rank 0 at " in caught.text, caught.text)
    close_group(group)


@pytest.mark.mpi(min_size=2)
def test_sizes_of_an_exchange_are_compared_before_anything_is_sent(simulated):
    group = opened("nccl")
    pieces = [ones(2) for _ in group.ranks]
    expected = [torch.zeros(3 if group.rank == 0 else 2, device=DEVICE) for _ in group.ranks]
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.all_to_all(expected, pieces, group)
    everyone("sends 2 elements to rank 0, which expects 3" in caught.text, caught.text)
    close_group(group)


def test_tensors_made_in_inference_mode(group):
    with torch.inference_mode():
        mine = [ones(4), ones(4, 2)[:, 0]]
    for tensor in mine:
        mpisgd.all_reduce(tensor, group=group)
        assert tensor.tolist() == [group.size] * 4


def test_mpi_that_says_it_takes_gpu_addresses_and_does_not_is_found_out(simulated, monkeypatch):
    """It leaves the memory as it is, on the last rank alone: all go through host memory, and one warns."""
    real, last = Communicator.broadcast, mpisgd.rank() == mpisgd.size() - 1

    def broadcast(self: Any, tensor: Tensor, root: int) -> None:
        if tensor.device.type == DEVICE:
            tensor.add_(1.0 if last else 0.0)
        else:
            real(self, tensor, root)

    monkeypatch.setattr(device_transport, "is_cuda_aware", lambda: True)
    monkeypatch.setattr(Communicator, "broadcast", broadcast)
    monkeypatch.setattr(selection, "_warned", False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        group = opened("mpi")
    everyone(group.device.selection.name == "pinned host memory")
    everyone("broadcast of 16 bytes" in group.device.selection.reason, group.device.selection.reason)
    everyone(len(seen) == (group.rank == 0), f"{[str(one.message) for one in seen]}")
    mine = ones(3)
    mpisgd.broadcast(mine, 0, group)
    everyone(mine.tolist() == [1.0] * 3)
    close_group(group)
