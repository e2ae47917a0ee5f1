"""`ProgressLoop`: which thread of a rank runs the cycles, and when it sleeps.

The engine has a progress thread, so that nothing needs a rank's main thread. But a thread that waits for a
result runs the cycles meanwhile, and the progress thread does not: waking another would only cost time.
"""

import sys
import threading
import time
from typing import Protocol

from mpisgd import tracing
from mpisgd.arguments import ranks_text
from mpisgd.core import wait_registry
from mpisgd.core.wait_registry import NO_TIMEOUT_S, WaitReason
from mpisgd.errors import CollectiveTimeout
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.tensor_queue import TensorQueue
from mpisgd.horovod.engine.wake_up import WakeUp
from mpisgd.monitor.rank_snapshot import stack_of

__all__ = ["Cycles", "ProgressLoop"]

JOIN_INTERVAL_S = 0.2  # how often who waits for the end of the thread looks for a deadlock


class Cycles(Protocol):
    """The cycles of an engine, which run in one thread at a time."""

    def is_finished(self) -> bool:
        """Return whether there will be none any more."""

    def is_cycle_due(self) -> bool:
        """Return whether this rank or another has something to send."""

    def run_one(self) -> None:
        """Run one, together with the other ranks."""

    def run_checks(self) -> None:
        """Look for stalls and for lost ranks."""

    def check_interval_s(self) -> float:
        """Return how soon to look again."""

    def abort(self, exc: BaseException) -> None:
        """Run no cycle any more, and fail all operations."""

    def can_progress(self) -> bool:
        """Return whether one runs, or will without this rank's program; from any thread."""

    def wait_hint(self, entry: Entry | None) -> WaitReason:
        """Tell for whom an operation waits, or, of None, the shutdown; from any thread."""

    def withdraw(self, entry: Entry, error: Exception) -> None:
        """Fail an operation that is part of a deadlock."""


class ProgressLoop:
    """The progress thread, and the threads that wait for operations.

    Args:
        cycles: what is run.
        queue: what this rank has submitted.
        wake_up: where threads sleep until there is something to do.

    Attributes:
        lock: held by the thread that runs a cycle.
    """

    def __init__(self, cycles: Cycles, queue: TensorQueue, wake_up: WakeUp) -> None:
        self.lock = threading.Lock()
        self._cycles = cycles
        self._queue = queue
        self._wake_up = wake_up
        self._thread = threading.Thread(target=self._serve, name="mpisgd horovod", daemon=True)

    def start(self) -> None:
        """Start the progress thread."""
        self._thread.start()

    def finish(self, limit_s: float) -> None:
        """Return when the last cycle has run.

        Raises:
            CollectiveTimeout: it has not within `limit_s` seconds.
            Deadlock: it never will.
        """
        self._wake_up.wake_own()
        began_s, key = time.monotonic(), object()
        wait_registry.register(key, began_s, NO_TIMEOUT_S, lambda: self._cycles.wait_hint(None))
        try:
            while self._thread.is_alive():
                self._thread.join(min(JOIN_INTERVAL_S, limit_s))
                if (error := wait_registry.cancel_error(began_s)) is not None:
                    raise error
                if self._thread.is_alive() and time.monotonic() - began_s > limit_s:
                    raise CollectiveTimeout(self._why_not_over(limit_s))
        finally:
            wait_registry.unregister(key)

    def _why_not_over(self, limit_s: float) -> str:
        whom = self._cycles.wait_hint(None).awaited
        late = ranks_text(whom) if whom else "some rank"
        frame = sys._current_frames().get(self._thread.ident or 0)
        return (
            f"hvd.shutdown: not over after {limit_s:g} s (MPISGD_TIMEOUT_S): {late} has neither called it "
            "nor come to its end. The thread of this rank's engine is here (the innermost call last):\n"
            f"{stack_of(frame)}"
        )

    def _serve(self) -> None:
        wait_registry.workers[threading.get_ident()] = self._cycles.can_progress
        try:
            while not self._cycles.is_finished():
                self._serve_or_sleep()
        except BaseException as exc:
            if not self._cycles.is_finished():
                self._cycles.abort(exc)
        finally:
            del wait_registry.workers[threading.get_ident()]

    def _serve_or_sleep(self) -> None:
        state = self._wake_up.state()
        steps_back = self._queue.num_waiting > 0
        if not steps_back and self._take(None):
            return
        sleep_s = self._queue.begin_sleep(self._cycles.check_interval_s())
        if steps_back and not self._queue.num_waiting:
            return
        self._wake_up.sleep(state, sleep_s)
        self._queue.end_sleep()

    def until(self, entry: Entry) -> None:
        """Run cycles until an operation is done; what was submitted before goes out at once.

        What interrupts this thread, such as Ctrl-C, is raised as it is. Between two cycles it changes nothing
        else; in the middle of one, where the other ranks are left without this one, it ends the engine.
        """
        began_s = time.monotonic()
        self._queue.count_waiting(1)
        try:
            with tracing.blocked(entry.request.label):
                while not entry.done.is_set():
                    state = self._wake_up.state()
                    if not self._take(entry) and not entry.done.is_set():
                        self._sleep(entry, state, began_s)
        finally:
            if not self._queue.count_waiting(-1):
                self._hand_back()

    def _sleep(self, entry: Entry, state: int, began_s: float) -> None:
        """Sleep until there may be something to do, or until it is found out that there never will be."""
        key = object()
        wait_registry.register(
            key, began_s, NO_TIMEOUT_S, lambda: self._cycles.wait_hint(entry), self._wake_up.wake_own
        )
        error = wait_registry.cancel_error(began_s)
        try:
            if error is None:
                self._wake_up.sleep(state, self._cycles.check_interval_s())
        finally:
            wait_registry.unregister(key)
        if (error := error or wait_registry.cancel_error(began_s)) is not None:
            self._cycles.withdraw(entry, error)

    def _take(self, awaited: Entry | None) -> bool:
        """Run a cycle if there is reason to, and return whether there was."""
        with self.lock:
            if awaited is not None and awaited.done.is_set():  # somebody else's cycle has seen to it
                return True
            try:
                if wanted := self._cycles.is_cycle_due():
                    self._cycles.run_one()
                self._cycles.run_checks()
            except BaseException as exc:
                self._cycles.abort(exc)
                if awaited is None or not isinstance(exc, Exception):
                    raise
                return True  # its error tells who waits for it
        if wanted and self._queue.num_waiting > (awaited is not None):
            self._wake_up.wake_own()  # others who wait may find theirs done
        return wanted

    def _hand_back(self) -> None:
        """Wake the engine's thread if there is something to do that it has left to those who waited."""
        if self.lock.acquire(blocking=False):
            try:
                wanted = self._cycles.is_cycle_due()
            finally:
                self.lock.release()
            if not wanted:
                return
        self._wake_up.wake_own()
