"""Many tensors in one operation: the coalescing manager, and the older coalesced calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from closed_form import assert_near, combined, given
from torch.distributed.distributed_c10d import _coalescing_manager

from mpisgd import ReduceOp

LENGTHS = (3, 50, 1, 1000)
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings(
    r"ignore:`torch.distributed.\w+` (is|will be) deprecated:FutureWarning"
)
both = pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
with_and_without_device = pytest.mark.parametrize("device", [None, CPU], ids=["fast", "old"])


def inputs_of(rank: int, rows: int = 1) -> list[torch.Tensor]:
    return [given(rank + i, torch.float64, (rows, length)) for i, length in enumerate(LENGTHS)]


def totals(pg: dist.ProcessGroup, op: ReduceOp, rows: int = 1) -> list[torch.Tensor]:
    by_tensor = zip(*(inputs_of(rank, rows) for rank in range(pg.size())), strict=True)
    return [combined(tensors, op) for tensors in by_tensor]


def check(out: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for got, want in zip(out, wanted, strict=True):
        assert_near(got, want)


@both
@with_and_without_device
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_coalesced_all_reduce(pg, device, async_ops, op):
    out = inputs_of(pg.rank())
    with _coalescing_manager(pg, device, async_ops) as manager:
        for tensor in out:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op), pg)
    if async_ops:
        manager.wait()
    check(out, totals(pg, ReduceOp[op]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int8], ids=str)
def test_coalesced_averages_of_integers_are_truncated(pg, dtype):
    rows = [given(rank, dtype, (pg.size(), 11)) for rank in range(pg.size())]
    wanted, mine = combined(rows, ReduceOp.AVG), rows[pg.rank()]
    wholes, parts = [mine.clone(), mine.clone()], [torch.zeros(1, 11, dtype=dtype) for _ in range(2)]
    with _coalescing_manager(pg, CPU, False):
        for whole in wholes:
            dist.all_reduce(whole, dist.ReduceOp.AVG, pg)
    with _coalescing_manager(pg, CPU, False):
        for part in parts:
            dist.reduce_scatter_tensor(part, mine, dist.ReduceOp.AVG, pg)
    check(wholes, [wanted, wanted])
    check(parts, [wanted[pg.rank()][None]] * 2)


@both
@with_and_without_device
def test_coalesced_all_gather(pg, device, async_ops):
    mine = inputs_of(pg.rank())
    out = [torch.zeros(pg.size(), length, dtype=torch.float64) for length in LENGTHS]
    with _coalescing_manager(pg, device, async_ops) as manager:
        for to, tensor in zip(out, mine, strict=True):
            dist.all_gather_into_tensor(to, tensor, pg)
    if async_ops:
        manager.wait()
    by_tensor = zip(*(inputs_of(rank) for rank in range(pg.size())), strict=True)
    check(out, [torch.cat(tensors) for tensors in by_tensor])


@both
@with_and_without_device
def test_coalesced_reduce_scatter(pg, device, async_ops):
    mine = inputs_of(pg.rank(), pg.size())
    out = [torch.zeros(1, length, dtype=torch.float64) for length in LENGTHS]
    with _coalescing_manager(pg, device, async_ops) as manager:
        for to, tensor in zip(out, mine, strict=True):
            dist.reduce_scatter_tensor(to, tensor, group=pg)
    if async_ops:
        manager.wait()
    check(out, [total[pg.rank()][None] for total in totals(pg, ReduceOp.SUM, pg.size())])


@both
def test_coalesced_messages_and_a_broadcast(pg, async_ops):
    """What torch does not collect by itself is issued at once; the manager's work stands for all of it."""
    rank, size = pg.rank(), pg.size()
    out, mine, root = torch.zeros(5), torch.full((5,), float(rank)), torch.full((7,), float(rank))
    with _coalescing_manager(pg, CPU, async_ops) as manager:
        dist.irecv(out, group_src=(rank - 1) % size, group=pg)
        dist.isend(mine, group_dst=(rank + 1) % size, group=pg)
        dist.broadcast(root, group_src=size - 1, group=pg, async_op=True)
    if async_ops:
        manager.wait()
    check([out, root], [torch.full((5,), float((rank - 1) % size)), torch.full((7,), float(size - 1))])


@both
def test_older_coalesced_calls(pg, async_ops):
    out = inputs_of(pg.rank())
    future = dist.all_reduce_coalesced(out, group=pg, async_op=async_ops)
    if async_ops:
        future.wait()
    check(out, totals(pg, ReduceOp.SUM))
    lists = [[torch.zeros(1, n, dtype=torch.float64) for n in LENGTHS] for _ in range(pg.size())]
    future = dist.all_gather_coalesced(lists, inputs_of(pg.rank()), pg, async_ops)
    if async_ops:
        future.wait()
    for rank, got in enumerate(lists):
        check(got, inputs_of(rank))
