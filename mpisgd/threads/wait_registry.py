"""What the engine reports about its waits: the one interface between it and whoever monitors it.

Engine                                             Monitor
    register / unregister: a thread waits              registered: what waits, for how long
    waiting_for: the same, as a context manager        cancel: end a wait with an error
    cancel_error: has the wait been cancelled?         on_timeout: set it to report timeouts
    report_timeout: the ranks missing at a timeout     mpi_calls, callbacks, workers,
    mpi_calls: blocking MPI calls under way            has_communicated: read them
    callbacks: callbacks of the program under way
    mark_communicating: this thread calls operations
    workers: threads that sleep until there is work

Only long waits register, so that short ones pay nothing. Any thread may read all of it at any time: each
entry is added and removed in one step.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "Message",
    "RegisteredWait",
    "RunningCallback",
    "WaitReason",
    "callbacks",
    "cancel",
    "cancel_error",
    "has_communicated",
    "mark_communicating",
    "mpi_calls",
    "on_timeout",
    "register",
    "registered",
    "report_timeout",
    "serial_of",
    "unregister",
    "waiting_for",
    "workers",
]

NO_TIMEOUT_S = float("inf")


class Message(NamedTuple):
    """A message that a rank sends or receives and that has not arrived.

    Attributes:
        group: name of its group.
        receives: whether the rank is at the receiving end.
        partners: global ranks, of which one is at the other end.
        tag: as the program gave it.
    """

    group: str
    receives: bool
    partners: tuple[int, ...]
    tag: int


@dataclass(frozen=True)
class WaitReason:
    """What a wait is for, where no operation of a queue tells it.

    Attributes:
        what: in words, `recv from rank 3`.
        group: name of the group, or "".
        awaited: global ranks that must each do something before this wait ends; empty: not known.
        members: global ranks of the group, where all of them must come; else empty.
        number: of the operation among those of the group, where all must come.
        ordinal: of the group among those of the same ranks.
        is_local: whether the wait is for another thread of this process.
        message: the one that is waited for, if it is one.
    """

    what: str
    group: str = ""
    awaited: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    number: int = 0
    ordinal: int = 0
    is_local: bool = False
    message: Message | None = None


class RegisteredWait(NamedTuple):
    """A wait of one thread.

    Attributes:
        thread: its identifier.
        since_s: when the wait began, by `time.monotonic`.
        timeout_s: after how many seconds it ends with an error; infinite: the wait for a thread that has one.
        reason: tells what for; None where the operation on the thread's queue says it.
        wake: has the thread check its `cancel_error`; None where it does so by itself.
        own_limit: whether the limit is that of this call alone, after which the program may go on.
    """

    thread: int
    since_s: float
    timeout_s: float
    reason: Callable[[], WaitReason] | None
    wake: Callable[[], None] | None = None
    own_limit: bool = False

    @property
    def serial(self) -> int:
        """The number of this wait, as `serial_of` has it."""
        return serial_of(self.since_s)


class RunningCallback(NamedTuple):
    """A callback on the future of an operation; those behind it in the queue wait for its end.

    Attributes:
        name: of the operation.
        group: its group.
        since_s: when it began, by `time.monotonic`.
        timeout_s: after how many seconds those that wait end with an error.
    """

    name: str
    group: str
    since_s: float
    timeout_s: float


def serial_of(since_s: float) -> int:
    """Return a number of a wait that began then, which no other wait of this process has."""
    return int(since_s * 1000)


# Set by the monitor: called by a thread whose wait has timed out, returns the missing ranks as text.
on_timeout: Callable[[], str] | None = None
# By thread: the MPI call that it is blocked in, which cannot be interrupted, and since when.
mpi_calls: dict[int, tuple[str, float]] = {}
# By thread: the callback of the program's that it runs, on the future of an operation.
callbacks: "dict[int, RunningCallback]" = {}
# Our threads that sleep until there is work for them: tells whether there is, or may be without another call.
workers: dict[int, Callable[[], bool]] = {}
_registered: dict[object, RegisteredWait] = {}
# By thread: the error that its wait that began then must end with.
_cancelled: dict[int, tuple[float, Exception]] = {}
# The threads that have ever called an operation. Not their identifiers, which the system reuses.
_communicating: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


class _ThisThread(threading.local):
    is_marked = False


_this_thread = _ThisThread()


def mark_communicating() -> None:
    """Note that this thread calls operations; costs next to nothing after the first time."""
    if not _this_thread.is_marked:
        _this_thread.is_marked = True
        _communicating.add(threading.current_thread())


def has_communicated(thread: threading.Thread) -> bool:
    """Return whether a thread has ever called an operation."""
    return thread in _communicating


def register(
    key: object,
    since_s: float,
    timeout_s: float,
    reason: Callable[[], WaitReason] | None = None,
    wake: Callable[[], None] | None = None,
    *,
    own_limit: bool = False,
) -> None:
    """Report that this thread waits, until `unregister(key)`; see `RegisteredWait`."""
    _registered[key] = RegisteredWait(threading.get_ident(), since_s, timeout_s, reason, wake, own_limit)


def unregister(key: object) -> None:
    """Report that the wait is over."""
    _registered.pop(key, None)


def registered() -> list[RegisteredWait]:
    """Return the waits under way, the longest first."""
    return sorted(_registered.copy().values(), key=lambda wait: wait.since_s)  # other threads change it


@contextlib.contextmanager
def waiting_for(reason: WaitReason, timeout_s: float | None = None) -> Iterator[None]:
    """Report that this thread waits meanwhile; `timeout_s`: a limit of this call alone."""
    key = object()
    limit_s = NO_TIMEOUT_S if timeout_s is None else timeout_s
    register(key, time.monotonic(), limit_s, lambda: reason, own_limit=limit_s != NO_TIMEOUT_S)
    try:
        yield
    finally:
        unregister(key)


def report_timeout() -> str:
    """Report this thread's timeout before it unregisters; return the missing ranks as text, or ""."""
    return "" if on_timeout is None else on_timeout()


def cancel(wait: RegisteredWait, error: Exception) -> None:
    """Let a wait end with an error."""
    _cancelled[wait.thread] = wait.since_s, error
    if wait.wake is not None:
        wait.wake()


def cancel_error(since_s: float) -> Exception | None:
    """Return, once, what this thread's wait that began then must end with; None where it may go on."""
    cancelled_s, error = _cancelled.get(threading.get_ident(), (0.0, None))
    if error is None or cancelled_s != since_s:
        return None
    del _cancelled[threading.get_ident()]
    return error
