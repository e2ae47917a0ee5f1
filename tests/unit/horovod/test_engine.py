"""What becomes of an operation, and of the engine, when the thread that waits is interrupted."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mpisgd.horovod.engine.engine import Engine
from mpisgd.horovod.engine.entry import Entry, to_internal_error
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.exceptions import HorovodInternalError
from mpisgd.threads.wait_registry import WaitReason


class OneOperation(Engine):
    """An engine with one operation: `run` is what a cycle does, `sleep` what a thread does between two."""

    def __init__(self, run: Callable[[OneOperation], Any], sleep: Callable[[OneOperation], Any]) -> None:
        self.entry = Entry(Request("allreduce.x", "allreduce"))
        self.failure: BaseException | None = None
        self.wanted = True
        self.num_waiting = 0
        self._run, self.while_asleep = run, sleep
        self.queue = self.wake_up = self  # type: ignore[assignment]
        self.lock = threading.Lock()

    # -- the cycles ------------------------------------------------------------------------------------

    def is_finished(self) -> bool:
        return self.failure is not None

    def is_cycle_due(self) -> bool:
        return self.wanted

    def run_one(self) -> None:
        self._run(self)

    def run_checks(self) -> None: ...

    def submit_deferred(self) -> None: ...

    def check_interval_s(self) -> float:
        return 0.01

    def abort(self, exc: BaseException) -> None:
        self.failure = exc
        self.entry.complete(error=to_internal_error(exc))

    def _wait_reason(self, request: Request | None) -> WaitReason:
        return WaitReason("hvd.allreduce 'x'")

    # -- what was submitted, and the wake-up --------------------------------------------------------------

    def count_waiting(self, change: int) -> int:
        self.num_waiting += change
        return self.num_waiting

    def state(self) -> int:
        return 0

    def wake_own(self) -> None: ...

    def sleep(self, state: int, limit_s: float) -> None:
        self.while_asleep(self)


def told(engine: OneOperation) -> None:
    """A cycle in which the other ranks have nothing to tell."""
    engine.wanted = False


def interrupted(engine: OneOperation) -> None:
    raise KeyboardInterrupt


def fails(engine: OneOperation) -> None:
    raise ValueError("a cycle")


def done(engine: OneOperation) -> None:
    engine.entry.complete(7)


def test_an_interrupt_between_two_cycles_is_raised_and_leaves_the_operation_under_way():
    engine = OneOperation(told, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.wait(engine.entry)
    assert (engine.failure, engine.entry.done.is_set(), engine.num_waiting) == (None, False, 0)
    engine.while_asleep = done
    assert engine.wait(engine.entry) == 7


def test_an_interrupt_in_a_cycle_is_raised_and_ends_the_engine():
    """The other ranks are in the middle of that cycle, and this one will not come back to it."""
    engine = OneOperation(interrupted, told)
    with pytest.raises(KeyboardInterrupt):
        engine.wait(engine.entry)
    assert isinstance(engine.failure, KeyboardInterrupt)
    with pytest.raises(HorovodInternalError):
        engine.wait(engine.entry)


def test_a_failed_cycle_is_the_operations_error():
    engine = OneOperation(fails, told)
    with pytest.raises(HorovodInternalError, match="a cycle"):
        engine.wait(engine.entry)
    assert isinstance(engine.failure, ValueError)


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, even if a shell has started the tests with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_another_thread_performs_the_operation_gives_no_result():
    engine = OneOperation(told, done)
    main = threading.main_thread().ident
    assert main is not None

    def interrupts() -> None:
        while not engine.num_waiting:
            time.sleep(0.001)
        time.sleep(0.05)  # for the lock
        signal.pthread_kill(main, signal.SIGINT)

    with engine.lock:  # a cycle runs
        thread = threading.Thread(target=interrupts)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.wait(engine.entry)
        thread.join()
    assert (engine.failure, engine.entry.done.is_set()) == (None, False)
