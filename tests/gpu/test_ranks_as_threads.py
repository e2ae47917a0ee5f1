"""Ranks that are threads of one process have the simulated GPU as processes have it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_under_test import DEVICE, gpu
from simulated_gpu.nccl import end_those_of_threads
from torch import nn

import mpisgd
from mpisgd.errors import PeerLost
from mpisgd.job.lifecycle import current_job
from mpisgd.job.threads_as_ranks import LOST, RankFailed, lose_ranks, run_ranks
from mpisgd.threads import scheduling

TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def alone(simulated) -> Iterator[None]:
    """Ranks that are processes have nothing to add."""
    if mpisgd.size() > 1:
        pytest.skip("said by one process")
    yield
    end_those_of_threads()


def begin(transport: str) -> None:
    gpu.set_device(mpisgd.local_rank())
    current_job().gpu = transport


def test_each_has_a_device_and_a_stream_of_its_own():
    def program() -> tuple[int, int, int]:
        begin("nccl")
        with gpu.stream(gpu.Stream()):
            before = gpu.current_stream().stream_id
            mpisgd.barrier()  # the others take theirs
            return gpu.current_device(), before, gpu.current_stream().stream_id

    found = run_ranks(4, program)
    assert [device for device, _, _ in found] == [0, 1, 2, 3]
    assert all(before == after != 0 for _, before, after in found)


def test_a_backward_on_a_gpu_is_part_of_its_rank():
    """Its hooks ask for the job, and wait for other ranks while these go on."""

    def program() -> int:
        begin("mpi")
        model, seen = nn.Linear(3, 2).to(DEVICE), []

        def reduce(param: torch.Tensor) -> None:
            seen.append(mpisgd.rank())
            mpisgd.all_reduce(param.grad)

        model.weight.register_post_accumulate_grad_hook(reduce)
        model(torch.ones(1, 3, device=DEVICE)).sum().backward()
        assert model.weight.grad.tolist() == [[3.0] * 3] * 2
        return seen[0]

    assert run_ranks(3, program) == [0, 1, 2]


@pytest.mark.parametrize("transport", ["nccl", "mpi"])
def test_messages_between_gpus_go_through_host_memory(transport):
    """Those of NCCL would poll for an answer, and let no other rank run that gives it."""

    def program() -> bool:
        begin(transport)
        mpisgd.all_reduce(torch.ones(1, device=DEVICE))
        before, after = (mpisgd.rank() - 1) % 3, (mpisgd.rank() + 1) % 3
        place, mine = (torch.full((1000,), float(of), device=DEVICE) for of in (-1, mpisgd.rank()))
        receive = mpisgd.irecv(place, before)
        mpisgd.send(mine, after)
        receive.wait()
        return bool((place == before).all().item()) and receive.get_future().wait()[0] is place

    assert run_ranks(3, program, timeout_s=TIMEOUT_S) == [True] * 3


@pytest.mark.parametrize("transport", ["nccl", "mpi"])
def test_survivors_of_a_lost_rank_are_told(transport):
    """Also where the host waits for the GPU by `.item()`."""

    def program() -> tuple[str, float]:
        begin(transport)
        tensor = torch.ones(4, device=DEVICE)
        mpisgd.all_reduce(tensor)
        mpisgd.barrier()
        if mpisgd.rank() == 2:
            lose_ranks(2)
        told, began_s = "nothing", scheduling.now_s()
        try:
            mpisgd.all_reduce(tensor)
            tensor.sum().item()
            mpisgd.all_reduce(tensor)
        except PeerLost as exc:
            told = str(exc)
        return told, scheduling.now_s() - began_s

    told = run_ranks(3, program, losses=(), timeout_s=TIMEOUT_S)
    assert told[2] is LOST
    assert all("of the job was lost" in text and took_s < TIMEOUT_S / 2 for text, took_s in told[:2]), told


def test_nccl_waits_for_a_rank_that_does_not_come_until_the_timeout():
    def program() -> None:
        begin("nccl")
        tensor = torch.ones(4, device=DEVICE)
        mpisgd.all_reduce(tensor)
        if mpisgd.rank() == 0:
            mpisgd.all_reduce(tensor)
            tensor.sum().item()
        mpisgd.barrier()

    with pytest.raises(RankFailed) as caught:
        run_ranks(2, program, timeout_s=1.0)
    assert isinstance(caught.value.errors[caught.value.rank], mpisgd.CollectiveTimeout)
