"""What `async_op=True` returns: torch's Work, with all that programs ask of it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from closed_form import assert_equal, assert_near, combined, given
from verdicts import raises_everywhere, referee

from mpisgd import CollectiveMismatch, CollectiveTimeout, ReduceOp

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch.distributed.\w+_tensor` is deprecated:FutureWarning")


def started(pg: dist.ProcessGroup) -> dict[str, tuple[dist.Work, list[torch.Tensor], list[torch.Tensor]]]:
    """Start one of each kind: its work, the tensors it writes, what they must become."""
    size, rank = pg.size(), pg.rank()
    inputs = [given(r, F64) for r in range(size)]
    total = combined(inputs, ReduceOp.SUM)
    whole = torch.cat([inputs[rank]] * size)

    def mine() -> torch.Tensor:
        return inputs[rank].clone()

    def blanks() -> list[torch.Tensor]:
        return [torch.zeros(131, dtype=F64) for _ in range(size)]

    calls = {}
    out = [mine()]
    calls["all_reduce"] = (dist.all_reduce(out[0], group=pg, async_op=True), out, [total])
    out = [mine()]
    calls["broadcast"] = (dist.broadcast(out[0], group_src=0, group=pg, async_op=True), out, [inputs[0]])
    out = blanks()
    calls["all_gather"] = (dist.all_gather(out, mine(), pg, async_op=True), out, inputs)
    out = blanks()
    work = dist.all_to_all(out, [mine() for _ in range(size)], pg, async_op=True)
    calls["all_to_all"] = (work, out, inputs)
    out = [torch.zeros(size * 131, dtype=F64)]
    work = dist.all_gather_into_tensor(out[0], mine(), pg, async_op=True)
    calls["all_gather_into_tensor"] = (work, out, [torch.cat(inputs)])
    out = [torch.zeros(131, dtype=F64)]
    work = dist.reduce_scatter_tensor(out[0], whole, group=pg, async_op=True)
    calls["reduce_scatter_tensor"] = (work, out, [total])
    out = blanks() if rank == 0 else []
    work = dist.gather(mine(), out or None, group_dst=0, group=pg, async_op=True)
    calls["gather"] = (work, out, inputs if rank == 0 else [])
    out = [torch.zeros(131, dtype=F64)]
    work = dist.scatter(out[0], list(inputs) if rank == 0 else None, group_src=0, group=pg, async_op=True)
    calls["scatter"] = (work, out, [inputs[rank]])
    calls["barrier"] = (dist.barrier(pg, async_op=True), [], [])
    return calls


def check(out: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for got, want in zip(out, wanted, strict=True):
        assert_near(got, want)


def test_a_work_tells_that_it_is_done(pg):
    for name, (work, out, wanted) in reversed(started(pg).items()):
        assert isinstance(work, dist.Work), name
        assert work.wait() is True
        assert work.wait(timedelta(seconds=5)) is True  # as often as one likes
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        work.synchronize()
        check(out, wanted)


def test_results_and_futures_hold_the_tensors_that_were_written(pg):
    for name, (work, out, wanted) in started(pg).items():
        value = work.get_future().wait()
        assert work.is_completed(), name
        check(out, wanted)
        if out:
            assert [tensor.data_ptr() for tensor in value] == [tensor.data_ptr() for tensor in out], name
            assert [tensor.data_ptr() for tensor in work.result()] == [t.data_ptr() for t in out], name


def test_a_blocking_operation_issued_by_the_group_itself_has_a_future_too(pg):
    """C++ asks for the future of what Python called blocking."""
    mine, opts = given(pg.rank(), F64), dist.AllreduceOptions()
    opts.asyncOp = False
    work = pg.allreduce([mine], opts)
    assert work.is_completed()
    (value,) = work.get_future().wait()
    assert value.data_ptr() == mine.data_ptr()
    assert_near(mine, combined([given(rank, F64) for rank in range(pg.size())], ReduceOp.SUM))


def test_then_runs_after_the_operation(pg):
    x = torch.ones(10, dtype=F64)
    future = dist.all_reduce(x, group=pg, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0].sum().item()).wait() == 10.0 * pg.size()


@pytest.mark.mpi(min_size=2)
def test_wait_with_a_time_limit_of_its_own(process_groups):
    """The operation goes on after it, and can be waited for again."""
    x = given(dist.get_rank(), F64)
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(CollectiveTimeout):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
        assert not work.is_success()
    referee().barrier()
    if dist.get_rank() != 0:
        work = dist.all_reduce(x, async_op=True)
    assert work.wait()
    assert work.is_success()  # the wait that had ended early was taken for a failure of the operation
    assert work.exception() is None
    assert_near(x, combined([given(r, F64) for r in range(dist.get_world_size())], ReduceOp.SUM))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("async_op", [False, True])
def test_ranks_that_disagree_all_learn_it_and_go_on(process_groups, async_op):
    pg, rank = process_groups["reversed"], dist.get_rank()
    x = torch.ones(3 + (rank == 1))

    def disagree() -> dist.Work | None:
        if rank == 0:
            return dist.broadcast(x, 0, pg, async_op)
        return dist.all_reduce(x, group=pg, async_op=async_op)

    if async_op:
        work = disagree()
        future = work.get_future()
        with raises_everywhere(CollectiveMismatch) as caught:
            work.wait()
        with raises_everywhere(RuntimeError) as from_future:
            future.wait()
        assert "broadcast" in from_future.text
        assert isinstance(work.exception(), CollectiveMismatch)
        assert work.is_completed()
        assert not work.is_success()
    else:
        with raises_everywhere(CollectiveMismatch) as caught:
            disagree()
    for word in ("broadcast", "all_reduce", "[3]", "[4]", "test_dist_work.py"):
        assert word in caught.text
    assert_equal(x, torch.ones(3 + (rank == 1)))
    dist.all_reduce(y := torch.ones(2), group=pg)
    assert_equal(y, torch.full((2,), float(pg.size())))
