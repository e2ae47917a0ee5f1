"""`Turns`: which thread of a rank runs the cycles, and when it sleeps.

The engine has a thread of its own, so that none of it needs a rank's main thread. But a thread that waits for
a result does the work meanwhile, and the engine's steps back: waking another would only cost time.
"""

import sys
import threading
import time
from typing import Protocol

from mpisgd import tracing
from mpisgd.core import wait_registry
from mpisgd.core.wait_registry import NO_TIMEOUT_S, WaitReason
from mpisgd.errors import CollectiveTimeout
from mpisgd.horovod.engine.doorbell import Doorbell
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.outbox import Outbox
from mpisgd.horovod.engine.request import ranks_text
from mpisgd.monitor.rank_snapshot import stack_of

__all__ = ["Cycles", "Turns"]

LISTEN_S = 0.2  # how often who waits for the end of the thread looks around


class Cycles(Protocol):
    """What is run in turns, by one thread at a time."""

    def are_over(self) -> bool:
        """Return whether there will be none any more."""

    def are_wanted(self) -> bool:
        """Return whether there is reason for one."""

    def run_one(self) -> None:
        """Run one, together with the other ranks."""

    def look_around(self) -> None:
        """Do what is to be done now and then."""

    def look_again_s(self) -> float:
        """Return how soon to do so again."""

    def give_up(self, exc: BaseException) -> None:
        """Run none any more."""

    def may_go_on(self) -> bool:
        """Return whether one runs, or will whatever this rank's program does; from any thread."""

    def about(self, entry: Entry | None) -> WaitReason:
        """Tell for whom an operation waits, or, of None, the end; from any thread."""

    def take_back(self, entry: Entry, error: Exception) -> None:
        """Let an operation fail that has been found to wait for ever."""


class Turns:
    """The engine's thread, and those that wait.

    Args:
        cycles: what is run.
        outbox: what this rank has submitted.
        bell: wakes those who sleep.

    Attributes:
        lock: held by whoever's turn it is.
    """

    def __init__(self, cycles: Cycles, outbox: Outbox, bell: Doorbell) -> None:
        self.lock = threading.Lock()
        self._cycles = cycles
        self._outbox = outbox
        self._bell = bell
        self._thread = threading.Thread(target=self._serve, name="mpisgd horovod", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def finish(self, limit_s: float) -> None:
        """Return when the last cycle has run.

        Raises:
            CollectiveTimeout: it has not within `limit_s` seconds.
            Deadlock: it never will.
        """
        self._bell.ring_own()
        began_s, key = time.monotonic(), object()
        wait_registry.register(key, began_s, NO_TIMEOUT_S, lambda: self._cycles.about(None))
        try:
            while self._thread.is_alive():
                self._thread.join(min(LISTEN_S, limit_s))
                if (error := wait_registry.cancel_error(began_s)) is not None:
                    raise error
                if self._thread.is_alive() and time.monotonic() - began_s > limit_s:
                    raise CollectiveTimeout(self._why_not_over(limit_s))
        finally:
            wait_registry.unregister(key)

    def _why_not_over(self, limit_s: float) -> str:
        whom = self._cycles.about(None).awaited
        late = ranks_text(whom) if whom else "some rank"
        frame = sys._current_frames().get(self._thread.ident or 0)
        return (
            f"hvd.shutdown: not over after {limit_s:g} s (MPISGD_TIMEOUT_S): {late} has neither called it "
            "nor come to its end. The thread of this rank's engine is here (the innermost call last):\n"
            f"{stack_of(frame)}"
        )

    def _serve(self) -> None:
        wait_registry.workers[threading.get_ident()] = self._cycles.may_go_on
        try:
            while not self._cycles.are_over():
                self._serve_or_sleep()
        except BaseException as exc:
            self._cycles.give_up(exc)
        finally:
            del wait_registry.workers[threading.get_ident()]

    def _serve_or_sleep(self) -> None:
        state = self._bell.state()
        steps_back = self._outbox.num_waiting > 0
        if not steps_back and self._take(None):
            return
        nap_s = self._outbox.begin_nap(self._cycles.look_again_s())
        if steps_back and not self._outbox.num_waiting:
            return
        self._bell.sleep(state, nap_s)
        self._outbox.end_nap()

    def until(self, entry: Entry) -> None:
        """Run cycles until an operation is done; what was submitted before goes out at once."""
        began_s = time.monotonic()
        self._outbox.count_waiting(1)
        try:
            with tracing.blocked(entry.request.label):
                while not entry.done.is_set():
                    state = self._bell.state()
                    if not self._take(entry) and not entry.done.is_set():
                        self._sleep(entry, state, began_s)
        except BaseException as exc:
            self._cycles.give_up(exc)
        finally:
            if not self._outbox.count_waiting(-1):
                self._hand_back()

    def _sleep(self, entry: Entry, state: int, began_s: float) -> None:
        """Sleep until there may be something to do, or until it is found out that there never will be."""
        key = object()
        wait_registry.register(
            key, began_s, NO_TIMEOUT_S, lambda: self._cycles.about(entry), self._bell.ring_own
        )
        error = wait_registry.cancel_error(began_s)
        try:
            if error is None:
                self._bell.sleep(state, self._cycles.look_again_s())
        finally:
            wait_registry.unregister(key)
        if (error := error or wait_registry.cancel_error(began_s)) is not None:
            self._cycles.take_back(entry, error)

    def _take(self, awaited: Entry | None) -> bool:
        """Run a cycle if there is reason to, and return whether there was."""
        with self.lock:
            if awaited is not None and awaited.done.is_set():  # somebody else's cycle has seen to it
                return True
            if wanted := self._cycles.are_wanted():
                self._cycles.run_one()
            self._cycles.look_around()
        if wanted and self._outbox.num_waiting > (awaited is not None):
            self._bell.ring_own()  # others who wait may find theirs done
        return wanted

    def _hand_back(self) -> None:
        """Wake the engine's thread if there is something to do that it has left to those who waited."""
        if self.lock.acquire(blocking=False):
            try:
                wanted = self._cycles.are_wanted()
            finally:
                self.lock.release()
            if not wanted:
                return
        self._bell.ring_own()
