"""The queue by itself: one rank, and a communicator and a digest exchange that need no MPI."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mpisgd import tracing
from mpisgd.core.consistency import Operation
from mpisgd.core.operation_queue import OperationQueue
from mpisgd.core.owner import Owner, owned_by
from mpisgd.core.submission import RepeatedOperation
from mpisgd.errors import CollectiveTimeout, MpiFailed


class Alone:
    """A communicator of one rank, and its digest exchange."""

    rank, size, global_ranks = 0, 1, (0,)
    only_thread = None

    def __init__(self) -> None:
        self.digest = 0

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj]

    def start(self, digest: int) -> None:
        self.digest = digest

    def advance(self) -> bool:
        return True

    def agree_soon(self) -> bool:
        return True

    def extremes(self) -> tuple[int, int]:
        return self.digest, self.digest


def make_queue(**options: Any) -> OperationQueue:
    alone = Alone()
    settings = {"name": "test", "timeout_s": 5.0, "threads_allowed": True, **options}
    return OperationQueue(alone, alone, **settings)


def test_operations_run_in_the_order_of_their_calls():
    queue, done = make_queue(), []
    started, go = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        go.wait(5.0)
        done.append(0)

    works = [queue.run(Operation("first"), first, async_op=True)]
    assert started.wait(5.0)
    works += [queue.run(Operation("next"), lambda i=i: done.append(i), async_op=True) for i in (1, 2)]
    go.set()
    queue.run(Operation("last"), lambda: done.append(3))
    assert done == [0, 1, 2, 3]
    assert all(work.wait(5.0) for work in works)
    queue.drain()


def test_a_drained_queue_can_be_used_again():
    queue, done = make_queue(), []
    for i in range(3):
        queue.run(Operation("barrier"), lambda i=i: done.append(i), async_op=True)
        queue.drain()
        assert done == list(range(i + 1))


def test_what_is_submitted_while_the_thread_ends_is_run(monkeypatch):
    """It was appended for a thread that had ended, and forgotten with it: its `wait()` never returned."""
    queue, works = make_queue(), []
    queue.run(Operation("barrier"), lambda: None, async_op=True).wait(5.0)
    join = threading.Thread.join

    def submit_after_end(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not works:  # another thread of the program, between the end of the queue's thread and drain's
            works.append(queue.run(Operation("barrier"), lambda: None, async_op=True))

    monkeypatch.setattr(threading.Thread, "join", submit_after_end)
    queue.drain()
    assert works[0].wait(5.0)
    monkeypatch.undo()
    queue.drain()


def test_a_failed_operation_breaks_the_queue_for_all_that_wait_in_it():
    told: list[str] = []
    queue = make_queue(on_failure=lambda: told.append("left"))

    def fail() -> None:
        raise OSError("no memory")

    works = [queue.run(Operation("reduce"), fail, async_op=True)]
    queue.drain()
    works.append(queue.run(Operation("barrier"), lambda: None, async_op=True))
    with pytest.raises(OSError, match="no memory"):
        works[0].wait(5.0)
    with pytest.raises(MpiFailed, match="cannot be used any more"):
        works[1].wait(5.0)
    assert told == ["left"]
    queue.drain()


def test_a_callback_may_wait_for_what_is_behind_it_in_the_queue():
    """It waited on the very thread that was to run it: for ever, without a limit or a report."""
    queue, seen = make_queue(), []
    started, go = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        go.wait(5.0)

    one = queue.run(Operation("first"), first, async_op=True)
    assert started.wait(5.0)
    two, three = (queue.run(Operation(name), lambda: None, async_op=True) for name in ("second", "third"))

    def by_work(future: Any) -> None:
        two.wait()
        seen.append(two.is_completed())

    def by_future(future: Any) -> None:
        future_of_three.wait()
        seen.append(three.is_completed())

    future_of_three = three.get_future()
    chain = one.get_future().then(by_work)
    two.get_future().then(by_future)
    go.set()
    assert three.wait(5.0)
    chain.wait()
    assert seen == [True, True]
    queue.drain()


def test_a_callback_that_waits_in_a_way_that_is_not_seen_ends_those_behind_it():
    queue = make_queue(timeout_s=0.5)
    started, go, end = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        go.wait(5.0)

    one = queue.run(Operation("first"), first, async_op=True)
    assert started.wait(5.0)
    two = queue.run(Operation("second"), lambda: None, async_op=True)
    one.get_future().then(lambda _: end.wait(20.0))  # as for a future that `then` has made of that of `two`
    go.set()
    with pytest.raises(CollectiveTimeout, match="callback on the future of first has run for longer"):
        two.wait()
    with pytest.raises(CollectiveTimeout, match="callback on the future of first has run for longer"):
        queue.drain()
    end.set()
    assert two.wait(5.0)
    queue.drain()


def test_the_thread_outlives_what_is_called_when_an_operation_is_over(capfd):
    """The queue stayed taken by a thread that had ended: everything behind waited for ever."""
    queue = make_queue()
    started, go = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        go.wait(5.0)

    def fail() -> None:
        raise KeyError("a broken callback")

    one = queue.run(Operation("first"), first, async_op=True)
    assert started.wait(5.0)
    one.when_done(fail)
    future = one.get_future()
    two = queue.run(Operation("second"), lambda: None, async_op=True)
    go.set()
    assert one.wait(5.0)
    assert two.wait(5.0)
    assert future.done()
    queue.drain()
    assert capfd.readouterr().err.count("KeyError: 'a broken callback'") == 1


def test_the_line_that_called_an_operation_is_found_while_something_else_runs_inside_it():
    """Also by another thread, which may find it in a library of Python's."""
    queue, sites = make_queue(), []
    inside, go = threading.Event(), threading.Event()

    def action() -> None:
        assert queue.running is not None
        sites.append(queue.running.site())
        inside.set()
        go.wait(5.0)

    def call() -> None:
        queue.run(Operation("first"), action)  # here

    thread = threading.Thread(target=call)
    thread.start()
    assert inside.wait(5.0)
    assert queue.running is not None
    sites.append(queue.running.site())
    go.set()
    thread.join()
    assert len({*sites}) == 1
    assert sites[0].startswith(f"{__file__}:{call.__code__.co_firstlineno + 1} in call"), sites


def test_an_operation_of_a_known_form_is_the_same_as_any_other():
    """To the other ranks, to whoever looks at the queue, and in the number of operations."""
    queue, other, seen = make_queue(), make_queue(), []
    operation = Operation("all_reduce", "SUM", "float32", (3,))
    again = RepeatedOperation(
        operation,
        lambda given: seen.append(("first", given, queue.consistency.number)),
        lambda given: seen.append(("rest", given, queue.running.operation, queue.running.site())),
    )
    for given in range(2):
        assert queue.run_again(again, given)  # here
        other.run(operation, lambda: None)
        assert queue.running is None
    assert [entry[:2] for entry in seen] == [("first", 0), ("rest", 0), ("first", 1), ("rest", 1)]
    assert seen[1][2] == operation
    line = test_an_operation_of_a_known_form_is_the_same_as_any_other.__code__.co_firstlineno + 10
    assert seen[1][3].startswith(f"{__file__}:{line} in test_an_operation"), seen
    assert vars(queue.consistency).items() >= {"number": 2, "history": other.consistency.history}.items()
    assert queue.consistency.past == other.consistency.past


def test_what_is_more_than_the_operation_itself_is_left_to_run(monkeypatch):
    """An owner, a timeline, ranks without data, a failure, another thread than may call, one before it."""
    queue, done = make_queue(), []
    again = RepeatedOperation(Operation("barrier"), done.append, done.append)
    with owned_by(Owner("optimizer", 1, "SGD", "")):
        assert not queue.run_again(again, 0)
    for place, name, value in (
        (tracing, "sink", object()),
        (queue, "uneven", object()),
        (queue, "broken", MpiFailed("before")),
        (queue.communicator, "only_thread", threading.get_ident() + 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert not queue.run_again(again, 0), name
    started, go = threading.Event(), threading.Event()
    queue.run(Operation("first"), lambda: (started.set(), go.wait(5.0)), async_op=True)
    assert started.wait(5.0)
    assert not queue.run_again(again, 0)
    go.set()
    queue.drain()
    queue.run(Operation("outer"), lambda: done.append(queue.run_again(again, 0)))
    assert done == [False]
    assert queue.consistency.number == 2
    assert queue.run_again(again, 1)
    assert done == [False, 1, 1]


def test_an_abort_just_before_its_turn_ends_an_operation_of_a_known_form(monkeypatch):
    """The abort was looked for before the turn was taken: the operation waited for ranks that do not come."""
    queue = make_queue()
    take_turn = queue._take_turn

    def abort_first(thread: int) -> bool:
        assert queue.abort(MpiFailed("aborted"))
        return take_turn(thread)

    monkeypatch.setattr(queue, "_take_turn", abort_first)
    assert not queue.run_again(RepeatedOperation(Operation("barrier")), None)
    monkeypatch.undo()
    with pytest.raises(MpiFailed, match="aborted"):
        queue.run(Operation("barrier"), lambda: None)


@pytest.mark.parametrize("part", [0, 1])
def test_a_failure_of_a_known_form_breaks_the_queue(part):
    queue = make_queue()

    def fail(given: int) -> None:
        raise OSError("no memory")

    parts = [lambda given: None] * 2
    parts[part] = fail
    again = RepeatedOperation(Operation("reduce"), *parts)
    with pytest.raises(OSError, match="no memory"):
        queue.run_again(again, 0)
    assert queue.running is None
    assert not queue.run_again(again, 0)
    with pytest.raises(MpiFailed, match="cannot be used any more"):
        queue.run(Operation("barrier"), lambda: None)
    queue.drain()
