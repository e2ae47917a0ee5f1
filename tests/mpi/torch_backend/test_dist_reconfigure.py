"""`reconfigure`: groups get other members. Judged by the meaning of torch's tests of fault tolerance.

Their names are those of torch's `test_c10d_fault_tolerance.py`, where there is one. The regime
`enable_reconfigure=True` and lost ranks: `tests/launch/test_torch_reconfigure.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from verdicts import everyone, raises_everywhere, referee, same_on_all_ranks

import mpisgd
from mpisgd.errors import CollectiveMismatch, CollectiveTimeout, InvalidArgument, NotInitialized
from mpisgd.job.lifecycle import current_job
from mpisgd.torch_backend import compat

pytestmark = pytest.mark.skipif(
    not compat.HAS_RECONFIGURE, reason=f"torch {torch.__version__} has no reconfigure; 2.14 has"
)

LIMIT = timedelta(seconds=30)
uuids = itertools.count(100)


@pytest.fixture
def pg() -> Iterator[dist.ProcessGroup]:
    """A group of all ranks, for one test."""
    made = dist.new_group()
    yield made
    dist.destroy_process_group(made)


def handles_of_all(pg: dist.ProcessGroup) -> list[str]:
    return referee().allgather(dist._get_reconfigure_handle(pg))


def reconfigure(pg: dist.ProcessGroup, uuid: int, handles: Sequence[str] | set[str], limit=LIMIT) -> None:
    assert dist._reconfigure(uuid, handles, pg, timeout=limit).wait()


def check_sum(pg: dist.ProcessGroup, size: int) -> None:
    """Every member gives its rank + 1."""
    assert pg.size() == size
    dist.all_reduce(mine := torch.full((4,), pg.rank() + 1.0), group=pg)
    assert torch.equal(mine, torch.full((4,), size * (size + 1) / 2)), f"{mine}"


def test_groups_say_that_they_can_be_reconfigured(pg):
    assert dist._supports_reconfigure(pg)
    assert dist._supports_reconfigure()
    assert pg._get_backend(torch.device("cpu")).supports_reconfigure
    handles = handles_of_all(pg)
    everyone(len(set(handles)) == pg.size(), f"{handles}")
    same_on_all_ranks(handles)


def test_reconfigure_identity(pg):
    """The same members again; the group before is closed, not left behind."""
    handles = handles_of_all(pg)
    known = len(current_job().groups)
    for _ in range(3):
        before = pg.mpisgd_group
        reconfigure(pg, next(uuids), handles)
        everyone(not before.is_usable, "it was left, with its memory, and not closed")
        everyone(pg.rank() == dist.get_rank(), f"{pg.rank()}")
        check_sum(pg, dist.get_world_size())
    everyone(len(current_job().groups) == known, f"{current_job().groups}")


@pytest.mark.mpi(min_size=2)
def test_reconfigure_orders_ranks_as_the_list_does_and_a_set_as_the_job(pg):
    handles = handles_of_all(pg)
    last = pg.size() - 1
    reconfigure(pg, next(uuids), handles[::-1])
    everyone(pg.rank() == last - dist.get_rank(), f"{pg.rank()}")
    check_sum(pg, last + 1)
    reconfigure(pg, next(uuids), set(handles))
    everyone(pg.rank() == dist.get_rank(), f"{pg.rank()}")
    check_sum(pg, last + 1)


@pytest.mark.mpi(min_size=2)
def test_reconfigure_then_send_recv(pg):
    reconfigure(pg, next(uuids), handles_of_all(pg)[::-1])
    rank, size = pg.rank(), pg.size()
    received = torch.zeros(4)
    works = [
        pg.send([torch.full((4,), rank + 1.0)], (rank + 1) % size, 0),
        pg.recv([received], (rank - 1) % size, 0),
    ]
    for work in works:
        work.wait()
    everyone(torch.equal(received, torch.full((4,), (rank - 1) % size + 1.0)), f"{received}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("which", ["last", "middle", "first"])
def test_shrink_exclude_one_rank(pg, which):
    """The others do not need it; it has the group before, and may destroy it alone."""
    size = pg.size()
    excluded = {"last": size - 1, "middle": size // 2, "first": 0}[which]
    handles = handles_of_all(pg)
    uuid = next(uuids)
    if dist.get_rank() == excluded:
        everyone(pg.size() == size)
        return
    reconfigure(pg, uuid, [handle for rank, handle in enumerate(handles) if rank != excluded])
    check_sum(pg, size - 1)
    tensor = torch.full((4,), 42.0 if pg.rank() == 0 else 0.0)
    dist.broadcast(tensor, group_src=0, group=pg)
    everyone(
        pg.rank() == dist.get_rank() - (dist.get_rank() > excluded) and bool((tensor == 42.0).all()),
        f"rank {pg.rank()}, {tensor}",
    )


def test_reconfigure_scale_down_up(pg):
    alone = [dist._get_reconfigure_handle(pg)]
    start = 1000 + 1000 * next(uuids)
    reconfigure(pg, start + dist.get_rank(), alone)
    check_sum(pg, 1)
    reconfigure(pg, start + 10, handles_of_all(pg))
    everyone(pg.rank() == dist.get_rank())
    check_sum(pg, dist.get_world_size())
    reconfigure(pg, start + 20 + dist.get_rank(), alone)
    check_sum(pg, 1)


@pytest.mark.mpi(min_size=2)
def test_reconfigure_late_join(pg):
    handles = handles_of_all(pg)
    first, both = next(uuids), next(uuids)
    half = pg.size() // 2
    if dist.get_rank() < half:
        reconfigure(pg, first, handles[:half])
        check_sum(pg, half)
    reconfigure(pg, both, handles_of_all(pg))
    everyone(pg.rank() == dist.get_rank())
    check_sum(pg, len(handles))


@pytest.mark.mpi(min_size=2)
def test_reconfigure_merge_split(pg):
    handles = handles_of_all(pg)
    split, low, high, both = pg.size() // 2, next(uuids), next(uuids), next(uuids)
    mine = handles[:split] if dist.get_rank() < split else handles[split:]
    reconfigure(pg, low if dist.get_rank() < split else high, mine)
    check_sum(pg, len(mine))
    reconfigure(pg, both, handles_of_all(pg))
    check_sum(pg, len(handles))


def test_reconfigure_after_abort(pg):
    from torch._C._distributed_c10d import ErrorType

    assert pg.get_error() == ErrorType.SUCCESS
    pg.abort()
    everyone(pg.get_error() == ErrorType.COMM_ERROR, f"{pg.get_error()}")
    with raises_everywhere(NotInitialized):
        dist.all_reduce(torch.ones(2), group=pg)
    reconfigure(pg, next(uuids), handles_of_all(pg))
    everyone(pg.get_error() == ErrorType.SUCCESS, f"{pg.get_error()}")
    check_sum(pg, dist.get_world_size())
    reconfigure(pg, next(uuids), handles_of_all(pg))
    check_sum(pg, dist.get_world_size())


@pytest.mark.mpi(min_size=2)
def test_reconfigure_after_timeout(pg):
    """Rank 0 does not come; the others time out, and all meet again."""
    from torch._C._distributed_c10d import ErrorType

    pg.set_timeout(timedelta(seconds=0.5))
    said = ""
    if dist.get_rank() != 0:
        with pytest.raises(CollectiveTimeout) as caught:
            dist.all_reduce(torch.ones(4), group=pg)
        said = "" if pg.get_error() == ErrorType.TIMEOUT else f"{pg.get_error()}: {caught.value}"
    everyone(said == "", said)
    pg.set_timeout(timedelta(seconds=25))
    reconfigure(pg, next(uuids), handles_of_all(pg))
    check_sum(pg, dist.get_world_size())
    everyone(pg.mpisgd_group.queue.consistency.timeout_s == 25)


def test_reconfigure_rejects_reused_uuid(pg):
    uuid = next(uuids)
    reconfigure(pg, uuid, handles_of_all(pg))
    with raises_everywhere(InvalidArgument) as caught:
        reconfigure(pg, uuid, handles_of_all(pg))
    assert "already used" in caught.text
    check_sum(pg, dist.get_world_size())


@pytest.mark.parametrize("case", ["unknown", "twice", "none", "timeout"])
def test_reconfigure_rejects_what_is_wrong_and_the_group_stays(pg, case):
    handles = handles_of_all(pg)
    wrong = {
        "unknown": [*handles, "mpisgd:nobody"],
        "twice": [*handles, handles[0]],
        "none": [],
        "timeout": handles,
    }[case]
    with raises_everywhere(InvalidArgument) as caught:
        reconfigure(pg, next(uuids), wrong, timedelta(0) if case == "timeout" else LIMIT)
    named = {"unknown": "nobody", "twice": "none twice", "none": "at least one", "timeout": "timeout"}[case]
    everyone(named in caught.text, caught.text)
    check_sum(pg, dist.get_world_size())


@pytest.mark.mpi(min_size=2)
def test_reconfigure_rejects_handles_without_this_rank(pg):
    handles = handles_of_all(pg)
    others = [handle for rank, handle in enumerate(handles) if rank != dist.get_rank()]
    with raises_everywhere(InvalidArgument) as caught:
        reconfigure(pg, next(uuids), others)
    everyone("lacks that of this rank" in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_a_member_that_does_not_come_is_named_and_the_group_stays(pg):
    """As torch's test of retries: with a fresh uuid it works."""
    handles, uuid = handles_of_all(pg), next(uuids)
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            reconfigure(pg, uuid, handles[:2], timedelta(seconds=0.3))
    everyone(True)
    check_sum(pg, len(handles))
    reconfigure(pg, next(uuids), handles)
    check_sum(pg, len(handles))


@pytest.mark.mpi(min_size=2)
def test_members_with_different_uuids_do_not_meet_and_the_group_stays(pg):
    handles, uuid = handles_of_all(pg), 10_000_000 + 10 * next(uuids)
    with raises_everywhere(CollectiveTimeout) as caught:
        reconfigure(pg, uuid + dist.get_rank(), handles, timedelta(seconds=0.3))
    everyone(f"uuid={uuid + dist.get_rank()}" in caught.text, caught.text)
    check_sum(pg, len(handles))
    reconfigure(pg, uuid + 9, handles)
    check_sum(pg, len(handles))


@pytest.mark.mpi(min_size=2)
def test_members_with_another_order_all_raise_and_the_group_stays(pg):
    handles = handles_of_all(pg)
    with raises_everywhere(CollectiveMismatch) as caught:
        reconfigure(pg, next(uuids), handles if dist.get_rank() else handles[::-1])
    everyone("another order" in caught.text, caught.text)
    check_sum(pg, len(handles))
    reconfigure(pg, next(uuids), handles)
    check_sum(pg, len(handles))


def test_native_calls_follow_the_group(pg):
    reconfigure(pg, next(uuids), handles_of_all(pg)[::-1])
    mine = torch.full((3,), mpisgd.rank() + 1.0)
    mpisgd.all_reduce(mine, group=pg.mpisgd_group)
    size = dist.get_world_size()
    everyone(torch.equal(mine, torch.full((3,), size * (size + 1) / 2)), f"{mine}")
