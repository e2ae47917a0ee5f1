"""Process groups of some ranks: who is in them, what they are called, their threads and their end."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from closed_form import assert_equal, assert_near, combined, given
from torch.distributed import distributed_c10d as c10d
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import ReduceOp
from mpisgd.job.lifecycle import current_job
from mpisgd.torch_backend import ProcessGroupMpisgd

F64 = torch.float64


def total_of(pg: dist.ProcessGroup) -> torch.Tensor:
    return combined([given(rank, F64) for rank in range(pg.size())], ReduceOp.SUM)


def check_all_reduce(pg: dist.ProcessGroup) -> None:
    dist.all_reduce(mine := given(pg.rank(), F64), group=pg)
    assert_near(mine, total_of(pg))


def test_a_group_knows_its_ranks_and_names(process_groups):
    for kind, pg in process_groups.items():
        ranks = dist.get_process_group_ranks(pg)
        assert isinstance(pg, ProcessGroupMpisgd), kind
        assert dist.get_backend(pg) == "mpisgd"
        assert pg.name() == "mpisgd"
        assert (dist.get_rank(pg), dist.get_world_size(pg)) == (pg.rank(), len(ranks))
        assert ranks[pg.rank()] == dist.get_rank()
        assert [dist.get_group_rank(pg, rank) for rank in ranks] == list(range(len(ranks)))
        assert [dist.get_global_rank(pg, place) for place in range(len(ranks))] == ranks
        assert tuple(ranks) == pg.mpisgd_group.ranks
        assert c10d._resolve_process_group(pg.group_name) is pg
        assert pg.group_name in repr(pg)
    assert (
        dist.get_process_group_ranks(process_groups["reversed"]) == list(range(dist.get_world_size()))[::-1]
    )
    same_on_all_ranks(process_groups["default"].group_name)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_are_no_members_pass_by():
    pg = dist.new_group(list(range(1, dist.get_world_size())), group_desc="all but the first")
    x = given(dist.get_rank(), F64)
    if dist.get_rank() == 0:
        assert pg is dist.GroupMember.NON_GROUP_MEMBER
        with pytest.warns(UserWarning, match="does not belong"):
            assert dist.all_reduce(x, group=pg) is None
        assert_equal(x, given(0, F64))
    else:
        assert pg.group_desc == "all but the first"
        check_all_reduce(pg)
        dist.destroy_process_group(pg)
    everyone(True)


def test_groups_made_by_their_members_alone():
    """Each half makes its groups without the other, and one of them makes more."""
    ranks = range(dist.get_world_size())
    half = list(ranks[dist.get_rank() % 2 :: 2])
    for _ in range(1 + dist.get_rank() % 2):
        pg = dist.new_group(half, use_local_synchronization=True)
        check_all_reduce(pg)
        dist.destroy_process_group(pg)
    everyone(True)


def test_subgroups_by_size_and_by_enumeration():
    size = dist.get_world_size()
    own, groups = dist.new_subgroups(group_size=1)
    assert (own.size(), len(groups)) == (1, size)
    check_all_reduce(own)
    pairs = [list(range(start, min(start + 2, size))) for start in range(0, size, 2)]
    mine, _ = dist.new_subgroups_by_enumeration(pairs)
    assert dist.get_process_group_ranks(mine) == pairs[dist.get_rank() // 2]
    check_all_reduce(mine)
    for pg in (own, mine):
        dist.destroy_process_group(pg)


def test_groups_of_the_same_ranks_have_an_order_each():
    """Even ranks begin with the first, odd ones with the second."""
    groups = [dist.new_group(), dist.new_group()]
    in_order = groups[:: 1 if dist.get_rank() % 2 else -1]
    for _ in range(10):
        tensors = [given(dist.get_rank(), F64) for _ in in_order]
        works = [dist.all_reduce(x, group=pg, async_op=True) for x, pg in zip(tensors, in_order, strict=True)]
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert_near(tensor, total_of(groups[0]))
    for pg in groups:
        dist.destroy_process_group(pg)


def test_groups_that_are_destroyed_leave_nothing_behind():
    def once() -> None:
        pg = dist.new_group()
        work = dist.all_reduce(torch.ones(5), group=pg, async_op=True)
        dist.destroy_process_group(pg)
        assert work.is_completed()

    once()
    gc.collect()
    gc.disable()  # what only it would free stays open for long
    try:
        before = _held()
        for _ in range(5):
            once()
    finally:
        gc.enable()
    everyone(_held() == before, f"{before} before, {_held()} after")


def _held() -> tuple[int, int, int]:
    """How many groups, open files and threads there are."""
    return len(current_job().groups), len(os.listdir("/proc/self/fd")), threading.active_count()


def test_a_destroyed_group_is_refused_by_name():
    pg = dist.new_group()
    dist.destroy_process_group(pg)
    with raises_everywhere(mpisgd.NotInitialized):
        pg.allreduce([torch.ones(2)])
    with raises_everywhere(ValueError):  # torch's own
        dist.destroy_process_group(pg)


def test_an_aborted_group_refuses_and_the_others_go_on():
    """On every rank: whoever comes back to it is told so at once."""
    pg = dist.new_group()
    pg.abort()
    with raises_everywhere(mpisgd.NotInitialized) as caught:
        dist.all_reduce(torch.ones(2), group=pg)
    assert "aborted" in caught.text
    dist.destroy_process_group(pg)
    check_all_reduce(dist.group.WORLD)


def refusal(call: Callable[[], object]) -> str:
    """What a call in an aborted group says on rank 0; others make none."""
    if dist.get_rank():
        return "aborted"
    try:
        call()
    except mpisgd.NotInitialized as exc:
        return str(exc)
    return "nothing"


def check_abort(pg: dist.ProcessGroup, delay_s: float, *calls: Callable[[], object]) -> None:
    """Rank 0 is alone in the group: the first call waits until another thread aborts it."""
    timer = threading.Timer(0.0 if dist.get_rank() else delay_s, pg.abort if not dist.get_rank() else int)
    timer.start()
    began = time.monotonic()
    said = [refusal(call) for call in calls]
    took_s = time.monotonic() - began
    timer.join()
    everyone(took_s < 10.0, f"{took_s}")
    everyone(all("aborted" in text for text in said), f"{said}")
    left = pg.mpisgd_group not in current_job().groups
    everyone(left == (dist.get_rank() == 0), f"{left}")
    if dist.get_rank():  # who has aborted has left: the ends of the others waited for it until the timeout
        dist.destroy_process_group(pg)
    everyone(True)
    if not dist.get_rank():
        dist.destroy_process_group(pg)
    check_all_reduce(dist.group.WORLD)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("delay_s", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["blocking", "asynchronous", "queued"])
def test_abort_ends_what_waits_in_the_group_on_this_rank(kind, delay_s):
    # Only later operations raised: what waited for the others went on until its time limit.
    check_abort_of_all_reduce(kind, delay_s)
    gc.collect()  # who has aborted a group is not warned of the work that nobody waited for


def check_abort_of_all_reduce(kind: str, delay_s: float) -> None:
    pg = dist.new_group()

    def wait() -> None:
        works = [dist.all_reduce(torch.ones(2), group=pg, async_op=kind != "blocking") for _ in range(2)]
        works[kind == "queued"].wait()

    check_abort(pg, delay_s, wait, lambda: dist.barrier(pg))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("start", [dist.isend, dist.irecv])
def test_abort_ends_messages_under_way(start):
    pg = dist.new_group()

    def wait() -> None:
        start(torch.ones(2**20), 1, pg).wait()

    check_abort(pg, 0.1, wait, *(lambda c=c: c(torch.ones(2), 1, pg) for c in (dist.isend, dist.irecv)))


def test_threads_with_a_group_each():
    groups = [dist.new_group() for _ in range(3)]
    results = [given(dist.get_rank(), F64) for _ in groups]

    def train(i: int) -> None:
        for step in range(12):
            work = dist.all_reduce(results[i], dist.ReduceOp.AVG, groups[i], async_op=step % 2 == 0)
            if work is not None:
                work.wait()
        dist.all_reduce(results[i], group=groups[i])

    threads = [threading.Thread(target=train, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, pg in zip(results, groups, strict=True):
        assert_near(result, total_of(pg))
        dist.destroy_process_group(pg)


def test_native_calls_and_calls_of_torch_keep_one_order(pg):
    """On torch's groups by `mpisgd_group`, and in the world beside them; blocking and not, in turn."""
    group, n = pg.mpisgd_group, pg.size()
    x, y = torch.ones(500, dtype=F64), torch.ones(500, dtype=F64)
    for _ in range(5):
        works = [dist.all_reduce(x, group=pg, async_op=True)]
        works += [mpisgd.all_reduce(x, group=group, async_op=True)]
        mpisgd.all_reduce(y, ReduceOp.AVG)
        dist.broadcast(x, group_src=n - 1, group=pg)
        mpisgd.all_reduce(x, ReduceOp.AVG, group)
        assert all(work.is_completed() for work in works)
    assert_equal(x, torch.full((500,), float(n) ** 10, dtype=F64))
    assert_equal(y, torch.ones(500, dtype=F64))


def test_a_store_is_shared_by_the_ranks():
    store = c10d._get_default_store()
    store.set(f"from {dist.get_rank()}", f"{dist.get_rank() * 7}")
    got = [int(store.get(f"from {rank}")) for rank in range(dist.get_world_size())]
    everyone(got == [7 * rank for rank in range(dist.get_world_size())], f"{got}")


def test_making_a_group_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pg = dist.new_group()
        dist.barrier(pg)
        dist.destroy_process_group(pg)
