"""Whoever waits, sleeps or starts a thread asks here whether a scheduler decides who runs.

Under MPI a rank is a process, and the system's scheduler decides. Where the ranks are threads of one process
(`mpisgd.transport.loopback`), ours does, from a seed, so that a run can be repeated: a thread that it knows
hands over at each of these places, and time is what it says.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from mpisgd.errors import MpisgdError

__all__ = [
    "Cancellation",
    "Scheduler",
    "install",
    "is_installed",
    "join",
    "now_s",
    "runs",
    "scheduler",
    "sleep",
    "wait_for_condition",
    "wait_for_event",
    "wait_for_future",
]


class Cancellation:
    """Whether all waits of a rank are cancelled; see `mpisgd.threads.waiting.cancel_all`.

    Attributes:
        error: why they are, None where they are not.
    """

    error: MpisgdError | None = None


class Scheduler(Protocol):
    """Decides which of its threads runs."""

    def now_s(self) -> float:
        """Return the simulated time, in seconds."""

    def knows_this_thread(self) -> bool:
        """Return whether this thread is one of its own."""

    def wait(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Let others run until `ready()` holds or so many simulated seconds are over; whether it holds."""

    def runs(self, thread: threading.Thread) -> bool:
        """Return whether a thread was started here and has not ended."""

    def start(self, thread: threading.Thread, start: Callable[[], None]) -> None:
        """Start a thread, by `start()`, that runs when it is its turn."""

    def cancellation(self) -> Cancellation:
        """Return whether the waits of this thread's rank are cancelled."""

    def at_loss(self, end: Callable[[], object]) -> None:
        """Call `end` where this thread's rank is lost: it does what the system does where a process ends."""

    def at_fault_point(self, kind: str, nbytes: int) -> int:
        """Return how many of so many bytes are written, or raise; see `mpisgd.threads.fault_points`."""


_installed: Scheduler | None = None


def install(new: Scheduler | None) -> None:
    """Let this one decide from now on; None: the system."""
    global _installed
    _installed = new


def is_installed() -> bool:
    """Return whether one decides, be it of this thread or of others."""
    return _installed is not None


def scheduler() -> Scheduler | None:
    """Return the scheduler of this thread, None where the system decides."""
    return _installed if _installed is not None and _installed.knows_this_thread() else None


def now_s() -> float:
    """Return the seconds since some moment, which never go back; as `time.monotonic`."""
    return time.monotonic() if (own := scheduler()) is None else own.now_s()


def sleep(seconds: float) -> None:
    """Sleep for so long."""
    if (own := scheduler()) is None:
        time.sleep(seconds)
    else:
        own.wait(lambda: False, seconds)


def runs(thread: threading.Thread) -> bool:
    """Return whether a thread was started and has not ended."""
    return thread.is_alive() if (own := scheduler()) is None else own.runs(thread)


def join(thread: threading.Thread, limit_s: float | None) -> None:
    """Wait for the end of a thread, or for so long."""
    if (own := scheduler()) is None:
        thread.join(limit_s)
    else:
        own.wait(lambda: not own.runs(thread), float("inf") if limit_s is None else limit_s)


def wait_for_event(event: threading.Event, limit_s: float) -> bool:
    """Wait until an event is set, or for so long, which may be infinite; return whether it is."""
    if (own := scheduler()) is not None:
        return own.wait(event.is_set, limit_s)
    return event.wait(None if limit_s == float("inf") else limit_s)


def wait_for_future(future: "torch.futures.Future[Any]") -> Any:
    """Wait for a future of torch, such as what `then` returns; return what it holds, or raise it."""
    if (own := scheduler()) is not None:
        own.wait(future.done, float("inf"))
    return future.wait()


def wait_for_condition(condition: threading.Condition, holds: Callable[[], bool]) -> None:
    """Wait until something holds, which others change and then notify the condition; its lock is held."""
    if (own := scheduler()) is None:
        condition.wait_for(holds)
        return
    while not holds():
        condition.release()
        try:
            own.wait(holds, float("inf"))
        finally:
            condition.acquire()
