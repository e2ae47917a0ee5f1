"""Groups: order of ranks, who may use them, many of them, and the world they are made of."""

from __future__ import annotations

import contextlib

import pytest
import torch
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd.job.groups import close_group, open_group
from mpisgd.job.lifecycle import current_job

COLLECTIVES = {
    "all_reduce": lambda g: mpisgd.all_reduce(torch.zeros(1), group=g),
    "all_reduce_async": lambda g: mpisgd.all_reduce(torch.zeros(1), group=g, async_op=True),
    "reduce": lambda g: mpisgd.reduce(torch.zeros(1), g.ranks[0], group=g),
    "broadcast": lambda g: mpisgd.broadcast(torch.zeros(1), g.ranks[0], g),
    "gather": lambda g: mpisgd.gather(torch.zeros(1), None, g.ranks[0], g),
    "scatter": lambda g: mpisgd.scatter(torch.zeros(1), None, g.ranks[0], g),
    "all_gather": lambda g: mpisgd.all_gather([torch.zeros(1)] * g.size, torch.zeros(1), g),
    "all_gather_into_tensor": lambda g: mpisgd.all_gather_into_tensor(torch.zeros(g.size), torch.zeros(1), g),
    "reduce_scatter": lambda g: mpisgd.reduce_scatter(torch.zeros(1), [torch.zeros(1)] * g.size, group=g),
    "reduce_scatter_tensor": lambda g: mpisgd.reduce_scatter_tensor(
        torch.zeros(1), torch.zeros(g.size), group=g
    ),
    "all_to_all": lambda g: mpisgd.all_to_all([torch.zeros(1)] * g.size, [torch.zeros(1)] * g.size, g),
    "all_to_all_single": lambda g: mpisgd.all_to_all_single(
        torch.zeros(g.size), torch.zeros(g.size), group=g
    ),
    "all_reduce_coalesced": lambda g: mpisgd.all_reduce_coalesced([torch.zeros(1)], group=g),
    "broadcast_coalesced": lambda g: mpisgd.broadcast_coalesced([torch.zeros(1)], g.ranks[0], g),
    "barrier": lambda g: mpisgd.barrier(g),
    "broadcast_object": lambda g: mpisgd.broadcast_object(None, g.ranks[0], g),
    "all_gather_object": lambda g: mpisgd.all_gather_object([None] * g.size, 1, g),
    "gather_object": lambda g: mpisgd.gather_object(1, None, g.ranks[0], g),
    "scatter_object": lambda g: mpisgd.scatter_object(None, g.ranks[0], g),
    "send": lambda g: mpisgd.send(torch.zeros(1), g.ranks[0], g),
    "recv": lambda g: mpisgd.recv(torch.zeros(1), g.ranks[0], g),
    "isend": lambda g: mpisgd.isend(torch.zeros(1), g.ranks[0], g),
    "irecv": lambda g: mpisgd.irecv(torch.zeros(1), None, g),
}


def test_rank_and_size(group):
    assert group.size == len(group.ranks)
    assert group.ranks[group.rank] == mpisgd.rank()
    assert group.name in repr(group)


def test_the_order_of_the_ranks_is_the_order_asked_for(groups):
    group, size = groups["reversed"], mpisgd.size()
    assert group.ranks == tuple(reversed(range(size)))
    assert group.rank == size - 1 - mpisgd.rank()
    out = torch.zeros(size)
    mpisgd.all_gather_into_tensor(out, torch.tensor([float(mpisgd.rank())]), group)
    assert out.tolist() == [float(rank) for rank in reversed(range(size))]


def test_src_and_dst_are_ranks_of_the_job(groups):
    group = groups["half"]
    src = group.ranks[-1]
    x = torch.tensor([float(mpisgd.rank())])
    mpisgd.broadcast(x, src, group)
    assert x.item() == src
    outsider = 1 - mpisgd.rank() % 2
    if outsider < mpisgd.size():
        with pytest.raises(mpisgd.InvalidRank, match=f"src={outsider}"):
            mpisgd.broadcast(x, outsider, group)


def test_roots_that_the_group_does_not_have_are_refused(group):
    x = torch.zeros(1)
    for root in (-1, mpisgd.size(), "0", None):
        for call in (
            lambda root=root: mpisgd.broadcast(x, root, group),
            lambda root=root: mpisgd.reduce(x, root, group=group),
            lambda root=root: mpisgd.gather(x, None, root, group),
            lambda root=root: mpisgd.scatter(x, None, root, group),
            lambda root=root: mpisgd.broadcast_object(1, root, group),
            lambda root=root: mpisgd.gather_object(1, None, root, group),
            lambda root=root: mpisgd.scatter_object(None, root, group),
        ):
            with pytest.raises(mpisgd.InvalidRank, match=group.name):
                call()
    mpisgd.barrier(group)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("member", [0, -1])
def test_a_group_of_one_and_the_ranks_outside(member):
    """Members use it; everyone else is told, by every operation."""
    member %= mpisgd.size()
    group = mpisgd.new_group([member], name="single")
    assert group.ranks == (member,)
    for name, call in COLLECTIVES.items():
        if mpisgd.rank() != member:
            assert group.rank == -1
            with pytest.raises(mpisgd.NotInGroup, match="single"):
                call(group)
        elif name in ("all_reduce", "all_to_all_single", "all_gather_object", "barrier", "broadcast_object"):
            assert group.rank == 0
            call(group)


def test_arguments_of_new_group_are_checked_before_anything_is_sent(groups):
    begun = groups["world"].queue.consistency.number
    for ranks in ([], [0, 0], [mpisgd.size()], [-1], ["0"]):
        with raises_everywhere(mpisgd.InvalidRank):
            mpisgd.new_group(ranks)
    everyone(groups["world"].queue.consistency.number == begun, "something was sent")


def test_new_group_after_a_disagreement(groups):
    if mpisgd.size() > 1:
        with raises_everywhere(mpisgd.CollectiveMismatch):
            mpisgd.new_group([mpisgd.rank()])
    group = mpisgd.new_group()
    same_on_all_ranks(group.name)
    mpisgd.barrier(group)


def test_many_groups():
    size = mpisgd.size()
    made = [mpisgd.new_group(sorted({i % size, (i + i % 3) % size})) for i in range(20)]
    for group in made:
        if group.rank >= 0:
            x = torch.ones(1)
            mpisgd.all_reduce(x, group=group)
            assert x.item() == group.size


def test_groups_can_be_closed_and_the_job_keeps_nothing_of_them():
    size, before = mpisgd.size(), len(current_job().groups)
    for left_out in range(size + 1):
        members = [rank for rank in range(size) if rank != left_out or size == 1]
        group = mpisgd.new_group(members)
        if mpisgd.rank() in members:
            mpisgd.all_reduce(torch.ones(1), group=group)
        mpisgd.close_group(group)  # ranks that are no members may call it, too
        mpisgd.close_group(group)
        error = mpisgd.NotInitialized if mpisgd.rank() in members else mpisgd.NotInGroup
        with pytest.raises(error, match="was closed" if error is mpisgd.NotInitialized else "none of them"):
            mpisgd.barrier(group)
    everyone(len(current_job().groups) == before, "the job has kept groups")


def test_a_closed_group_is_not_used_by_calls_that_it_knows():
    """What is remembered of a call goes on to the queue of the group without asking for it."""
    group = mpisgd.new_group()
    calls = [COLLECTIVES[name] for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "barrier")]
    for call in (*calls, *calls):
        call(group)
    mpisgd.close_group(group)
    for call in calls:
        with raises_everywhere(mpisgd.NotInitialized):
            call(group)


def test_a_group_that_nobody_closes_is_kept_on_its_members_alone():
    before = len(current_job().groups)
    group = mpisgd.new_group([0])
    assert len(current_job().groups) == before + (mpisgd.rank() == 0)
    mpisgd.close_group(group)


def test_the_group_of_the_whole_job_is_not_closed(groups):
    with raises_everywhere(mpisgd.InvalidArgument):
        mpisgd.close_group(current_job().world)
    with raises_everywhere(mpisgd.InvalidArgument):
        mpisgd.close_group(None)
    mpisgd.barrier()


def test_topology_of_the_job_and_of_a_group(groups):
    """The tests run on one host."""
    assert (mpisgd.local_rank(), mpisgd.local_size()) == (mpisgd.rank(), mpisgd.size())
    assert (mpisgd.node_rank(), mpisgd.num_nodes()) == (0, 1)
    group = groups["reversed"]
    assert group.topology.local_rank == group.rank
    assert group.topology.size == group.size


def test_init_again_changes_nothing():
    world = mpisgd.job.lifecycle.world()
    mpisgd.init()
    assert mpisgd.job.lifecycle.world() is world
    assert mpisgd.is_initialized()


def test_init_with_another_communicator_is_refused():
    from mpi4py import MPI

    with raises_everywhere(mpisgd.AlreadyInitialized):
        mpisgd.init(MPI.COMM_SELF)


@pytest.mark.parametrize("arguments", [{"timeout_s": 0}, {"timeout_s": -1.0}, {"num_threads": 0}], ids=str)
def test_arguments_of_init_are_checked(arguments):
    with raises_everywhere(mpisgd.InvalidArgument):
        mpisgd.init(**arguments)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("comes_late", [False, True])
def test_what_ranks_have_sent_in_an_attempt_that_failed_is_no_part_of_another(comes_late):
    """One rank fails before the attempt, or begins when the others have given up, and gives up then, too."""
    is_absent = mpisgd.rank() == mpisgd.size() - 1

    def attempt(timeout_s: float) -> mpisgd.Group:
        return open_group(current_job(), range(mpisgd.size()), name="again", timeout_s=timeout_s)

    def fails() -> bool:
        with contextlib.suppress(mpisgd.CollectiveTimeout):
            attempt(0.3)
            return False
        return True

    for _ in range(2):
        everyone(is_absent or fails(), "made a group without its last rank")
        everyone(not (comes_late and is_absent) or fails(), "made a group alone")
    group = attempt(30.0)
    x = torch.ones(1)
    mpisgd.all_reduce(x, group=group)
    close_group(group)
    everyone(x.item() == mpisgd.size())
