"""A group's own methods, called as programs call those of torch's groups: with and without options."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from closed_form import assert_near, combined, given
from torch import Tensor
from verdicts import raises_everywhere

from mpisgd import ReduceOp

F64 = torch.float64
MAX = dist.ReduceOp.MAX
LIMIT = timedelta(seconds=20)


def total(pg: dist.ProcessGroup, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    return combined([given(rank, F64) for rank in range(pg.size())], op)


@pytest.mark.parametrize(
    ("args", "kwargs", "op"),
    [
        ((), {}, ReduceOp.SUM),
        ((MAX,), {}, ReduceOp.MAX),
        ((MAX, LIMIT), {}, ReduceOp.MAX),
        ((), {"op": MAX}, ReduceOp.MAX),
        ((), {"timeout": LIMIT}, ReduceOp.SUM),
        ((None,), {}, ReduceOp.SUM),
        ((dist.AllreduceOptions(),), {}, ReduceOp.SUM),
        ((), {"opts": dist.AllreduceOptions()}, ReduceOp.SUM),
    ],
)
def test_allreduce(pg, args, kwargs, op):
    for in_a_list in (False, True):
        mine = given(pg.rank(), F64)
        pg.allreduce([mine] if in_a_list else mine, *args, **kwargs).wait()
        assert_near(mine, total(pg, op))


def test_broadcast_and_reduce(pg):
    last = pg.size() - 1
    for args, kwargs in (((last,), {}), ((), {"root": last}), ((last, LIMIT), {})):
        mine = given(pg.rank(), F64)
        pg.broadcast(mine, *args, **kwargs).wait()
        assert_near(mine, given(last, F64))
    for args, op in (((last,), ReduceOp.SUM), ((last, MAX), ReduceOp.MAX)):
        mine = given(pg.rank(), F64)
        pg.reduce(mine, *args).wait()
        assert_near(mine, total(pg, op) if pg.rank() == last else given(pg.rank(), F64))


def test_lists_with_one_tensor_per_rank(pg):
    size, rank, last = pg.size(), pg.rank(), pg.size() - 1
    inputs = [given(r, F64) for r in range(size)]

    def blanks(rows: int = size) -> list[Tensor]:
        return [torch.zeros(131, dtype=F64) for _ in range(rows)]

    out = blanks()
    pg.allgather(out, inputs[rank]).wait()
    assert_near(torch.stack(out), torch.stack(inputs))
    out = blanks() if rank == last else []
    pg.gather(out, inputs[rank], last).wait()
    assert rank != last or torch.equal(torch.stack(out), torch.stack(inputs))
    (got,) = blanks(1)
    pg.scatter(got, inputs if rank == last else [], last).wait()
    assert_near(got, inputs[rank])
    for args, op in (((), ReduceOp.SUM), ((MAX,), ReduceOp.MAX)):
        (got,) = blanks(1)
        pg.reduce_scatter(got, [inputs[rank]] * size, *args).wait()
        assert_near(got, total(pg, op))


def test_barrier(pg):
    for args, kwargs in (((), {}), ((LIMIT,), {}), ((), {"timeout": LIMIT}), ((dist.BarrierOptions(),), {})):
        assert pg.barrier(*args, **kwargs).wait()


def test_what_a_method_does_not_take_is_refused(pg):
    with raises_everywhere(TypeError):
        pg.broadcast(torch.ones(2), "first")
    pg.barrier().wait()
