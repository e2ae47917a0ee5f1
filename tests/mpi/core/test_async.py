"""async_op=True: the same results later, in the order of the calls, whoever waits or forgets."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from closed_form import assert_equal, assert_near, combined, given

import mpisgd
from mpisgd import Group, ReduceOp
from mpisgd.core.consistency import Operation
from mpisgd.core.work import QueuedWork

DTYPE = torch.float64


def started(group: Group) -> dict[str, tuple[mpisgd.Work, list[torch.Tensor], list[torch.Tensor]]]:
    """Start one of each kind: its work, the tensors that will change, what they must become."""
    size, rank, first = group.size, group.rank, group.ranks[0]
    inputs = [given(r, DTYPE) for r in range(size)]
    total = combined(inputs, ReduceOp.SUM)

    def mine() -> torch.Tensor:
        return inputs[rank].clone()

    def blanks() -> list[torch.Tensor]:
        return [torch.zeros(131, dtype=DTYPE) for _ in range(size)]

    calls = {}
    out = [mine()]
    calls["all_reduce"] = (mpisgd.all_reduce(out[0], group=group, async_op=True), out, [total])
    out = [mine()]
    work = mpisgd.all_reduce(out[0], group=group, async_op=True, algorithm="ring")
    calls["ring"] = (work, out, [total])
    out = [mine()]
    work = mpisgd.reduce(out[0], first, group=group, async_op=True)
    calls["reduce"] = (work, out, [total if rank == 0 else inputs[rank]])
    out = [mine()]
    calls["broadcast"] = (mpisgd.broadcast(out[0], first, group, async_op=True), out, [inputs[0]])
    out = blanks() if rank == 0 else []
    work = mpisgd.gather(mine(), out or None, first, group, async_op=True)
    calls["gather"] = (work, out, inputs if rank == 0 else [])
    out = [torch.zeros(131, dtype=DTYPE)]
    work = mpisgd.scatter(out[0], list(inputs) if rank == 0 else None, first, group, async_op=True)
    calls["scatter"] = (work, out, [inputs[rank]])
    out = blanks()
    calls["all_gather"] = (mpisgd.all_gather(out, mine(), group, async_op=True), out, inputs)
    out = [torch.zeros(size, 131, dtype=DTYPE)]
    work = mpisgd.all_gather_into_tensor(out[0], mine(), group, async_op=True)
    calls["all_gather_into_tensor"] = (work, out, [torch.stack(inputs)])
    out = [torch.zeros(131, dtype=DTYPE)]
    work = mpisgd.reduce_scatter(out[0], [mine() for _ in range(size)], group=group, async_op=True)
    calls["reduce_scatter"] = (work, out, [total])
    out = [torch.zeros(131, dtype=DTYPE)]
    whole = torch.cat([mine() for _ in range(size)])
    work = mpisgd.reduce_scatter_tensor(out[0], whole, group=group, async_op=True)
    calls["reduce_scatter_tensor"] = (work, out, [total])
    out = blanks()
    work = mpisgd.all_to_all(out, [mine() for _ in range(size)], group, async_op=True)
    calls["all_to_all"] = (work, out, inputs)
    out = [torch.zeros(size * 131, dtype=DTYPE)]
    work = mpisgd.all_to_all_single(out[0], whole, group=group, async_op=True)
    calls["all_to_all_single"] = (work, out, [torch.cat(inputs)])
    out = [mine(), mine()]
    work = mpisgd.all_reduce_coalesced(out, group=group, async_op=True)
    calls["all_reduce_coalesced"] = (work, out, [total, total])
    out = [mine(), mine()]
    work = mpisgd.broadcast_coalesced(out, first, group, async_op=True)
    calls["broadcast_coalesced"] = (work, out, [inputs[0]] * 2)
    calls["barrier"] = (mpisgd.barrier(group, async_op=True), [], [])
    return calls


def check(out: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for got, want in zip(out, wanted, strict=True):
        assert_near(got, want)


def test_every_collective_completes(group):
    for name, (work, out, wanted) in started(group).items():
        assert isinstance(work, mpisgd.Work), name
        assert work.wait() is True
        assert work.is_completed()
        check(out, wanted)
        assert work.wait() is True  # as often as one likes


def test_waiting_in_the_opposite_order(group):
    for work, out, wanted in reversed(started(group).values()):
        work.wait()
        check(out, wanted)


def test_futures_hold_the_tensors(group):
    for name, (work, out, wanted) in started(group).items():
        future = work.get_future()
        assert future is work.get_future()
        value = future.wait()
        assert work.is_completed()
        if name == "barrier":
            assert value is None
        else:
            assert [id(tensor) for tensor in value] == [id(tensor) for tensor in out]
        check(out, wanted)


def test_operations_complete_in_the_order_of_the_calls(group):
    tensors = [given(group.rank + i, DTYPE) for i in range(60)]
    works = [mpisgd.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for i, work in enumerate(works):
        work.wait()
        assert all(earlier.is_completed() for earlier in works[:i])
    for i, tensor in enumerate(tensors):
        assert_near(tensor, combined([given(rank + i, DTYPE) for rank in range(group.size)], ReduceOp.SUM))


def test_operations_on_one_tensor_happen_one_after_the_other(group):
    """No wait in between: the queue's order is enough."""
    x = torch.ones(1000, dtype=DTYPE)
    works = [mpisgd.all_reduce(x, group=group, async_op=True) for _ in range(10)]
    mpisgd.broadcast(x, group.ranks[-1], group)
    assert all(work.is_completed() for work in works)
    assert_equal(x, torch.full((1000,), float(group.size) ** 10, dtype=DTYPE))


def test_blocking_calls_in_between_keep_the_order(group):
    x, y = torch.ones(100, dtype=DTYPE), given(group.rank, DTYPE)
    for _ in range(20):
        work = mpisgd.all_reduce(x, ReduceOp.AVG, group, async_op=True)
        mpisgd.broadcast(y, group.ranks[0], group)
        assert work.is_completed()
        mpisgd.barrier(group)
    assert_equal(x, torch.ones(100, dtype=DTYPE))
    assert_equal(y, given(0, DTYPE))


def test_tensors_that_the_caller_drops_still_travel(group):
    """An address holds no reference: the work must."""
    out = torch.zeros(group.size, 4096)
    works = []
    for i in range(20):
        works.append(mpisgd.all_gather_into_tensor(out, torch.full((4096,), float(i)), group, async_op=True))
        mpisgd.all_reduce(torch.full((4096,), -1.0), group=group, async_op=True)
        if i % 10 == 0:
            gc.collect()  # slow, with all that torch has loaded
        _junk = [torch.full((4096,), 99.0) for _ in range(4)]
    works[-1].wait()
    assert_equal(out, torch.full((group.size, 4096), 19.0))
    mpisgd.barrier(group)


def test_two_groups_in_opposite_order(groups):
    """With one thread for both, this would never end."""
    first, second = groups["world"], groups["duplicate"]
    pair = (first, second) if mpisgd.rank() % 2 else (second, first)
    for _ in range(20):
        tensors = [torch.ones(5000, dtype=DTYPE) for _ in pair]
        works = [mpisgd.all_reduce(x, group=g, async_op=True) for x, g in zip(tensors, pair, strict=True)]
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            assert_equal(tensor, torch.full((5000,), float(mpisgd.size()), dtype=DTYPE))


def test_a_blocking_call_passes_an_operation_of_another_group(groups):
    """The other ranks join the first operation only after the second: groups must not wait for each other."""
    first, second = groups["world"], groups["duplicate"]
    x = torch.ones(10, dtype=DTYPE)
    early = mpisgd.rank() == 0
    work = mpisgd.all_reduce(x, group=first, async_op=True) if early else None
    mpisgd.barrier(second)
    work = work or mpisgd.all_reduce(x, group=first, async_op=True)
    work.wait()
    assert_equal(x, torch.full((10,), float(mpisgd.size()), dtype=DTYPE))


def test_then_runs_after_the_operation_with_its_result(group):
    x = torch.ones(10, dtype=DTYPE)
    future = mpisgd.all_reduce(x, group=group, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0].sum().item()).wait() == 10.0 * group.size


@pytest.mark.parametrize("async_op", [False, True])
def test_a_collective_inside_a_callback(group, async_op):
    def callback(done: torch.futures.Future) -> torch.Tensor:
        y = done.value()[0] * 2
        work = mpisgd.all_reduce(y, group=group, async_op=async_op)
        if work is not None:
            work.wait()
        return y

    x = torch.ones(10, dtype=DTYPE)
    y = mpisgd.all_reduce(x, group=group, async_op=True).get_future().then(callback).wait()
    assert_equal(y, torch.full((10,), 2.0 * group.size**2, dtype=DTYPE))
    mpisgd.barrier(group)


def test_errors_come_out_of_wait_and_of_the_future(groups):
    if mpisgd.size() == 1:
        pytest.skip("nobody to disagree with")
    group = groups["duplicate"]
    x = torch.ones(3 + mpisgd.rank())
    work = mpisgd.all_reduce(x, group=group, async_op=True)
    with pytest.raises(mpisgd.CollectiveMismatch, match="shape"):
        work.wait()
    with pytest.raises(mpisgd.CollectiveMismatch):
        work.wait()
    future = mpisgd.all_reduce(x, group=group, async_op=True).get_future()
    with pytest.raises(mpisgd.CollectiveMismatch):
        future.wait()
    assert_equal(x, torch.ones(3 + mpisgd.rank()))
    mpisgd.barrier(group)


def test_an_error_that_nobody_waits_for_is_warned_of(groups):
    if mpisgd.size() == 1:
        pytest.skip("nobody to disagree with")
    group = groups["duplicate"]
    works = [mpisgd.all_reduce(torch.ones(3 + mpisgd.rank()), group=group, async_op=True)]
    mpisgd.barrier(group)

    def forget() -> None:
        works.clear()
        gc.collect()  # the error's traceback refers to the work

    with pytest.warns(RuntimeWarning, match="nobody waited"):
        forget()


def test_an_idle_queue_does_not_keep_the_last_tensors_alive(group):
    x = torch.ones(10)
    work = mpisgd.all_reduce(x, group=group, async_op=True)
    work.wait()
    alive = weakref.ref(x)
    del x, work
    for _ in range(100):
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None
    mpisgd.barrier(group)


def test_wait_with_a_time_limit_of_its_own(groups):
    """The operation goes on after it, and can be waited for again."""
    if mpisgd.size() == 1:
        pytest.skip("nobody to wait for")
    group = groups["duplicate"]
    if mpisgd.rank() == 0:
        work = mpisgd.barrier(group, async_op=True)
        with pytest.raises(mpisgd.CollectiveTimeout):
            work.wait(0.05)
        assert not work.is_completed()
    mpisgd.barrier()
    if mpisgd.rank() != 0:
        work = mpisgd.barrier(group, async_op=True)
    assert work.wait()


def test_many_threads_of_one_rank_use_a_group_of_their_own(groups):
    groups_here = [groups["world"], groups["duplicate"], groups["reversed"]]
    results = [torch.ones(100, dtype=DTYPE) for _ in groups_here]

    def work(i: int) -> None:
        for _ in range(10):
            mpisgd.all_reduce(results[i], ReduceOp.AVG, groups_here[i])
        mpisgd.all_reduce(results[i], group=groups_here[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(groups_here))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        assert_equal(result, torch.full((100,), float(mpisgd.size()), dtype=DTYPE))


@pytest.mark.mpi(min_size=2)
def test_what_makes_no_sense_after_a_failure_is_dropped_on_all_ranks():
    """Ranks disagree on the first of a chain of operations; the rest must not pass for what comes next."""
    queue = mpisgd.new_group().queue
    ran: list[int] = []
    works: list[QueuedWork] = []
    for i in range(3 + mpisgd.rank()):  # not everybody has got as far
        operation = Operation("chain", shape=(mpisgd.rank() if i == 0 else i,))
        after = works[-1] if works else None
        works.append(queue.run(operation, lambda i=i: ran.append(i), async_op=True, after=after))
    for work in works:
        with pytest.raises(mpisgd.CollectiveMismatch, match="chain"):
            work.wait()
    queue.run(Operation("the next"), lambda: ran.append(99))
    assert ran == [99]
