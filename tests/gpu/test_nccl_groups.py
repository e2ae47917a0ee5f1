"""How communicators of NCCL are made: with which options, and split from the world's."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_under_test import DEVICE
from simulated_gpu.nccl import NcclOptions, SimulatedNccl
from simulated_gpu.runtime import SimulatedGpu
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd.job.groups import close_group
from mpisgd.job.lifecycle import current_job, world
from mpisgd.transport.device.nccl import Nccl

SOON_S = 10.0  # long before any timeout


@pytest.fixture(autouse=True)
def by_nccl(simulated, expected_way) -> None:
    if expected_way != "nccl":
        pytest.skip("there is no communicator")


@pytest.fixture
def world_by_nccl(by_nccl) -> SimulatedNccl:
    mpisgd.all_reduce(torch.ones(1, device=DEVICE))
    return world().device.backend.inner


def sum_in(group: mpisgd.Group) -> float:
    tensor = torch.full((3,), mpisgd.rank() + 1.0, device=DEVICE)
    mpisgd.all_reduce(tensor, group=group)
    return tensor.sum().item() / 3


def options(**config: int) -> NcclOptions:
    made = NcclOptions(is_high_priority_stream=True)
    for name, value in config.items():
        setattr(made.config, name, value)
    return made


# -- split ------------------------------------------------------------------------------------------------


def test_a_new_group_is_split_from_the_world_and_connected_when_it_is_made(world_by_nccl):
    before = world_by_nccl.num_splits
    group = mpisgd.new_group()
    inner = group.device.backend.inner
    everyone(inner.options.split_from is world_by_nccl)
    everyone(world_by_nccl.num_splits == before + 1)
    total = mpisgd.size() * (mpisgd.size() + 1) / 2
    everyone((sum_in(group), sum_in(world())) == (total, total))
    close_group(group)
    everyone(inner.ended == "shutdown")


@pytest.mark.mpi(min_size=2)
def test_ranks_that_are_no_members_take_part_in_the_split(world_by_nccl):
    before = world_by_nccl.num_splits
    groups = [mpisgd.new_group([rank]) for rank in range(mpisgd.size())]
    everyone(world_by_nccl.num_splits == before + mpisgd.size())
    own = groups[mpisgd.rank()]
    everyone(sum_in(own) == mpisgd.rank() + 1)
    everyone(all(group.device is None for group in groups if group.rank < 0))
    total = mpisgd.size() * (mpisgd.size() + 1) / 2
    everyone(sum_in(world()) == total)
    close_group(own)


def test_nothing_is_split_while_the_gpu_works(world_by_nccl):
    """NCCL may hang then; the simulated one asserts it."""
    tensor = torch.ones(4, device=DEVICE)
    work = mpisgd.all_reduce(tensor, async_op=True)
    group = mpisgd.new_group()
    work.wait()
    everyone(tensor.tolist() == [float(mpisgd.size())] * 4)
    close_group(group)


def test_a_world_without_nccl_has_nothing_to_split(idle_world, simulated):
    num_opened = len(simulated.opened)
    group = mpisgd.new_group()
    everyone(group.device is None)
    everyone(len(simulated.opened) == num_opened)
    sum_in(group)
    everyone(simulated.opened[-1].options.split_from is None)
    close_group(group)


def fails_before_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimulatedGpu.make_nccl

    def make(self: SimulatedGpu, *about: Any) -> SimulatedNccl:
        if mpisgd.rank() == 1:
            raise dist.DistBackendError("no memory left for the rings")
        return real(self, *about)

    monkeypatch.setattr(SimulatedGpu, "make_nccl", make)


def is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Nccl.quiet

    def quiet(self: Nccl) -> Any:
        if mpisgd.rank() == 1:
            raise mpisgd.CollectiveTimeout("no memory left for the rings")
        return real(self)

    monkeypatch.setattr(Nccl, "quiet", quiet)


def fails_in_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimulatedNccl.split

    def split(self: SimulatedNccl) -> None:
        if mpisgd.rank() == 1:
            raise dist.DistBackendError("no memory left for the rings")
        real(self)

    monkeypatch.setattr(SimulatedNccl, "split", split)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("members", ["all", "one"])
@pytest.mark.parametrize("how", [fails_before_the_split, is_busy, fails_in_the_split])
def test_a_rank_that_cannot_split_is_an_error_on_every_rank(world_by_nccl, monkeypatch, how, members):
    """The others waited for it inside NCCL. Members or not, all of them are told, and soon."""
    ranks = list(range(mpisgd.size())) if members == "all" else [1]
    num_groups = len(current_job().groups)
    torch.get_device_module(DEVICE).synchronize()
    began_s = time.monotonic()
    with monkeypatch.context() as patch:
        how(patch)
        with raises_everywhere(mpisgd.NcclFailed) as caught:
            mpisgd.new_group(ranks, name="new")
    everyone("group 'new'" in caught.text and "rank 1: no memory left" in caught.text, caught.text)
    everyone(time.monotonic() - began_s < SOON_S)
    everyone(len(current_job().groups) == num_groups)
    total = mpisgd.size() * (mpisgd.size() + 1) / 2
    everyone(sum_in(world()) == total)
    everyone((world().device.backend.inner is world_by_nccl) == (how is not fails_in_the_split))
    group = mpisgd.new_group()
    everyone(sum_in(group) == total)
    close_group(group)


# -- options ----------------------------------------------------------------------------------------------


@pytest.fixture
def of_job() -> Iterator[NcclOptions]:
    """Options of the job, as `init` has taken them."""
    current_job().pg_options = given = options(max_ctas=7)
    yield given
    current_job().pg_options = None


def test_options_of_a_group_reach_nccl(idle_world, simulated):
    given = options(min_ctas=2, max_ctas=4)
    group = mpisgd.new_group(pg_options=given)
    sum_in(group)
    reached = simulated.opened[-1].options
    everyone(reached is not given)
    config = reached.config
    everyone((reached.is_high_priority_stream, config.min_ctas, config.max_ctas) == (True, 2, 4))
    close_group(group)


def test_options_of_the_job_are_those_of_groups_without_any(of_job, idle_world, simulated):
    group = mpisgd.new_group()
    sum_in(group)
    reached = simulated.opened[-1].options
    everyone((reached.is_high_priority_stream, reached.config.max_ctas) == (True, 7))
    close_group(group)


def split_from_another() -> NcclOptions:
    made = options()
    made.split_from = SimulatedNccl.__new__(SimulatedNccl)
    return made


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"max_ctas": 4}, "expected a torch.distributed.ProcessGroupNCCL.Options"),
        (options(min_ctas=8, max_ctas=4), "min_ctas=8 and max_ctas=4"),
        (options(min_ctas=0), "min_ctas=0"),
        (options(blocking=0), "never tested"),
        (split_from_another(), "split_from"),
    ],
)
def test_wrong_options_are_an_error_on_every_rank(given, what):
    """Also where one rank alone gives them."""
    for mine in (given, given if mpisgd.rank() == 0 else None):
        with raises_everywhere(mpisgd.InvalidArgument) as caught:
            mpisgd.new_group(pg_options=mine)
        everyone(what in str(caught.error), f"{caught.error}")


@pytest.mark.mpi(min_size=2)
def test_options_that_differ_are_an_error_on_every_rank():
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.new_group(pg_options=options(max_ctas=mpisgd.rank() + 1))
    everyone("rank 0: is_high_priority_stream=True, max_ctas=1" in str(caught.error), f"{caught.error}")


def test_what_nccl_itself_refuses_is_an_error_on_every_rank_and_the_group_goes_on(idle_world, simulated):
    group = mpisgd.new_group(pg_options=options(cga_cluster_size=9))
    with raises_everywhere(mpisgd.NcclFailed) as caught:
        sum_in(group)
    everyone("cgaClusterSize 9" in str(caught.error), f"{caught.error}")
    mpisgd.barrier(group)
    close_group(group)


@pytest.fixture
def no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_options_of_torchs_process_groups_reach_nccl(no_process_group, simulated):
    dist.init_process_group("mpisgd", pg_options=options(max_ctas=3))
    tensor = torch.ones(3, device=DEVICE)
    dist.all_reduce(tensor)
    everyone(tensor.tolist() == [float(mpisgd.size())] * 3)
    everyone(simulated.opened[-1].options.config.max_ctas == 3)


@pytest.mark.parametrize("given", [{"max_ctas": 4}, options(min_ctas=8, max_ctas=4)], ids=["type", "range"])
def test_wrong_options_of_torchs_process_groups_are_an_error_on_every_rank(no_process_group, given):
    with raises_everywhere(mpisgd.InvalidArgument):
        dist.init_process_group("mpisgd", pg_options=given)
    mpisgd.barrier()


# -- what is watched --------------------------------------------------------------------------------------


def test_an_operation_that_is_watched_keeps_no_memory(world_by_nccl, simulated):
    """What a blocking operation has packed is free at its end, long before the GPU has done it."""
    tensors = [torch.ones(1000, 3, device=DEVICE)[:, 0] for _ in range(3)]
    gc.collect()  # what tests before this one have left is not counted
    torch.get_device_module(DEVICE).synchronize()
    gc.collect()
    before = torch.get_device_module(DEVICE).memory_allocated()
    for _ in range(5):
        mpisgd.all_reduce_coalesced(tensors)
    everyone(not torch.get_device_module(DEVICE).current_stream().query(), "the GPU has done it already")
    everyone(torch.get_device_module(DEVICE).memory_allocated() <= before)
