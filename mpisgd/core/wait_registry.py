"""Who waits in this process, and for what: long waits note themselves here, so that short ones pay nothing.

Threads other than the noted ones read this at any time; each entry is put and taken away in one step.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mpisgd.monitor.rank_state import Message

__all__ = [
    "WaitReason",
    "Waiter",
    "cancel_wait",
    "communicates",
    "forget",
    "has_communicated",
    "inside",
    "inside_mpi",
    "note",
    "noted",
    "say_nothing",
    "serial_of",
    "verdict",
    "waiting_for",
    "workers",
]

NO_LIMIT_S = float("inf")


class WaitReason(NamedTuple):
    """What a wait is for, where no operation of a queue tells it.

    Attributes:
        what: in words, `recv from rank 3`.
        group: name of the group, or "".
        whom: global ranks of whom each must do something before this wait ends; empty: not known.
        members: global ranks of the group, where all of them must come; else empty.
        number: of the operation among those of the group, where all must come.
        ordinal: of the group among those of the same ranks.
        own: whether the wait is for another thread of this process.
        message: the one that is waited for, if it is one.
    """

    what: str
    group: str = ""
    whom: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    number: int = 0
    ordinal: int = 0
    own: bool = False
    message: Message | None = None


class Waiter(NamedTuple):
    """A thread that waits.

    Attributes:
        thread: its identifier.
        since_s: when the wait began, by `time.monotonic`.
        limit_s: after how many seconds it ends with an error; infinite: the wait for a thread that has one.
        about: tells what for; None where the operation on the thread's queue says it.
        wake: has the thread look for its `verdict`; None where it does so by itself.
    """

    thread: int
    since_s: float
    limit_s: float
    about: Callable[[], WaitReason] | None
    wake: Callable[[], None] | None = None

    @property
    def serial(self) -> int:
        """See `serial_of`."""
        return serial_of(self.since_s)


def serial_of(since_s: float) -> int:
    """Return what tells a wait that began then from the others of its process."""
    return int(since_s * 1000)


def say_nothing() -> str:
    """Stand for `at_limit` where nobody watches."""
    return ""


# Called by a thread whose wait has come to its limit, before that is taken back; returns who is missing, and
# may tell the user before.
at_limit: Callable[[], str] = say_nothing
_noted: dict[object, Waiter] = {}
# By thread: the MPI call that it is blocked in, which cannot be interrupted, and since when.
inside: dict[int, tuple[str, float]] = {}
# The threads that have ever called an operation. Not their numbers, which the system gives out again.
_communicators: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
# Our threads that sleep until there is something to do for them: tells whether there is, or may be by itself.
workers: dict[int, Callable[[], bool]] = {}
# By thread: what its wait that began then must end with.
_cancelled: dict[int, tuple[float, Exception]] = {}


class _Mine(threading.local):
    """What this thread has noted of itself."""

    communicates = False


_mine = _Mine()


def communicates() -> None:
    """Note that this thread calls operations; costs next to nothing after the first time."""
    if not _mine.communicates:
        _mine.communicates = True
        _communicators.add(threading.current_thread())


def has_communicated(thread: threading.Thread) -> bool:
    """Return whether a thread has ever called an operation."""
    return thread in _communicators


def note(
    key: object,
    since_s: float,
    limit_s: float,
    about: Callable[[], WaitReason] | None = None,
    wake: Callable[[], None] | None = None,
) -> None:
    """Say that this thread waits, until `forget(key)`."""
    _noted[key] = Waiter(threading.get_ident(), since_s, limit_s, about, wake)


def forget(key: object) -> None:
    """Take back `note`."""
    _noted.pop(key, None)


def noted() -> list[Waiter]:
    """Return who waits now, the longest first."""
    return sorted(_copy(_noted), key=lambda waiter: waiter.since_s)


def cancel_wait(waiter: Waiter, error: Exception) -> None:
    """Let a wait end with an error."""
    _cancelled[waiter.thread] = waiter.since_s, error
    if waiter.wake is not None:
        waiter.wake()


def verdict(since_s: float) -> Exception | None:
    """Return, once, what this thread's wait that began then must end with; None where it may go on."""
    condemned_s, error = _cancelled.get(threading.get_ident(), (0.0, None))
    if error is None or condemned_s != since_s:
        return None
    del _cancelled[threading.get_ident()]
    return error


def inside_mpi() -> dict[int, tuple[str, float]]:
    """Return which threads are blocked in which MPI call, since when."""
    return dict(inside)


@contextlib.contextmanager
def waiting_for(hint: WaitReason, limit_s: float | None = None) -> Iterator[None]:
    """Note that this thread waits meanwhile."""
    key = object()
    note(key, time.monotonic(), NO_LIMIT_S if limit_s is None else limit_s, lambda: hint)
    try:
        yield
    finally:
        forget(key)


def _copy(entries: dict[object, Waiter]) -> list[Waiter]:
    return list(entries.values())
