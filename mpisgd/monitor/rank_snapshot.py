"""This process's own state: what its threads wait for, their stacks, and those that an error has ended."""

import collections
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpisgd.core import wait_registry
from mpisgd.core.wait_registry import RegisteredWait
from mpisgd.errors import MpisgdError
from mpisgd.monitor.rank_state import RUNS, WAITS, RankState, Wait, group_key

if TYPE_CHECKING:
    from mpisgd.core.group import Group
    from mpisgd.core.operation_queue import OperationQueue, RunningOperation
    from mpisgd.transport.messages.point_to_point import PointToPoint

__all__ = ["MONITOR_THREAD", "failed_threads", "note_failed_thread", "stack_of", "take_snapshot"]

MAX_FRAMES = 24
MAX_THREADS = 32
MAX_FAILED_THREADS = 4
MONITOR_THREAD = "mpisgd stall monitor"
HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
PACKAGE = os.path.dirname(os.path.dirname(HERE)) + os.sep
STANDARD_LIBRARY = os.path.dirname(os.path.abspath(threading.__file__)) + os.sep
# The innermost frames of a thread that waits or reports its wait say nothing about it.
WAITING = (HERE, os.path.join(PACKAGE, "core", "waiting.py"))
# A call site is a line of the program: neither ours nor torch's.
NOT_THE_PROGRAM = (PACKAGE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, STANDARD_LIBRARY)


class _OpenGroup(NamedTuple):
    """What is read of a group, which another thread may close meanwhile."""

    name: str
    ranks: tuple[int, ...]
    ordinal: int
    queue: "OperationQueue"
    point_to_point: "PointToPoint"


def _open_groups(groups: Iterable["Group"]) -> list[_OpenGroup]:
    found = []
    for group in list(groups):
        with contextlib.suppress(MpisgdError):  # closed, or lost, or this rank is no member
            found.append(
                _OpenGroup(group.name, group.ranks, group.ordinal, group.queue, group.point_to_point)
            )
    return found


def take_snapshot(
    rank: int, host: str, groups: Iterable["Group"], reported: Sequence[int] = (), *, stacks: bool = True
) -> RankState:
    """Return what this process does right now.

    Args:
        rank: its global rank.
        host: name of this host.
        groups: of the job; those that it can use are examined.
        reported: see `RankState.reported`.
        stacks: whether they are wanted.
    """
    frames = sys._current_frames()
    threads = threading.enumerate()
    names = {thread.ident or 0: thread.name for thread in threads}
    opened = _open_groups(groups)
    waits = tuple(_waits(opened, frames, names))
    waiting = {wait.thread for wait in waits}
    return RankState(
        rank,
        host,
        os.getpid(),
        WAITS if any(wait.is_main for wait in waits) else RUNS,
        waits,
        _stacks(frames, names) if stacks else {},
        {group_key(group.ranks, group.ordinal): group.queue.consistency.number for group in opened},
        tuple(message for group in opened for message in group.point_to_point.in_flight()),
        any(may_work() for may_work in list(wait_registry.workers.values()))
        or any(_may_communicate(thread, frames) for thread in threads if thread.name not in waiting),
        sum(group.queue.consistency.number + group.point_to_point.num_ended for group in opened),
        tuple(reported),
        tuple(str(failed) for failed in failed_threads),
    )


def _may_communicate(thread: threading.Thread, frames: Mapping[int, FrameType]) -> bool:
    """Return whether a thread that is not in one of our waits may go on to communicate, as far as is known.

    One of our own does unless it is idle. One of the user's does if it ever has; if it has not, it is taken
    to be about to while it runs code of the program.
    """
    frame = frames.get(thread.ident or 0)
    if thread is threading.main_thread() or thread.name == MONITOR_THREAD or frame is None:
        return False
    if thread.ident in wait_registry.workers:  # they tell it themselves
        return False
    idle = frame.f_code.co_filename.startswith(STANDARD_LIBRARY)
    if thread.name.startswith("mpisgd"):
        return not idle
    return wait_registry.has_communicated(thread) or (not idle and bool(_site(frame)))


def _waits(
    groups: Sequence[_OpenGroup], frames: Mapping[int, FrameType], names: Mapping[int, str]
) -> list[Wait]:
    """Return one entry per waiting thread, the longest wait first."""
    mpi_calls = dict(wait_registry.mpi_calls)
    by_thread: dict[int, list[RegisteredWait]] = collections.defaultdict(list)
    for registered in wait_registry.registered():
        by_thread[registered.thread].append(registered)
    pairs = [(group, group.queue.running) for group in groups]
    operations = {running.thread: (group, running) for group, running in pairs if running is not None}
    found = []
    for thread in by_thread.keys() | mpi_calls.keys():
        wait = _wait(by_thread.get(thread, []), mpi_calls.get(thread), operations.get(thread))
        site = wait.site or _site(frames.get(thread))
        is_main = thread == threading.main_thread().ident
        found.append(replace(wait, site=site, thread=names.get(thread, str(thread)), is_main=is_main))
    return sorted(found, key=lambda wait: -wait.waited_s)


def _wait(
    registered: Sequence[RegisteredWait],
    mpi_call: tuple[str, float] | None,
    operation: "tuple[_OpenGroup, RunningOperation] | None",
) -> Wait:
    """Put together one thread's wait: the outermost says what for, the innermost the timeout."""
    now_s = time.monotonic()
    call, since_s = mpi_call or ("", now_s)
    since_s = min(since_s, *(wait.since_s for wait in registered), now_s)
    timeouts_s = [wait.timeout_s for wait in registered if wait.timeout_s != wait_registry.NO_TIMEOUT_S]
    reasons = [wait.reason() for wait in registered if wait.reason is not None]
    common: dict[str, Any] = {
        "waited_s": now_s - since_s,
        "timeout_s": timeouts_s[-1] if timeouts_s else None,
        "mpi_call": call,
        "serial": wait_registry.serial_of(since_s),
    }
    if reasons:
        return Wait(**vars(reasons[0]), **common)
    if operation is not None:
        group, running = operation
        common["timeout_s"] = common["timeout_s"] or group.queue.consistency.timeout_s
        what, number = str(running.operation), group.queue.consistency.number
        return Wait(what, group.name, (), group.ranks, number, group.ordinal, site=running.site(), **common)
    return Wait(f"MPI {call}" if call else "other ranks", **common)


def _site(frame: FrameType | None) -> str:
    """Return the line of the program that a thread is at, or came from."""
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_PROGRAM):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""


def stack_of(frame: FrameType | None) -> str:
    """Return a thread's stack, the innermost call last; without those by which it waits and tells of it."""
    while frame is not None and frame.f_code.co_filename.startswith(WAITING):
        frame = frame.f_back
    return "".join(traceback.format_stack(frame, MAX_FRAMES)) if frame is not None else ""


def _stacks(frames: Mapping[int, FrameType], names: Mapping[int, str]) -> dict[str, str]:
    """Return the stacks of all threads but the monitor's own, the main thread's first."""
    main = threading.main_thread().ident
    others = [ident for ident in frames if ident != main and names.get(ident) != MONITOR_THREAD]
    threads = [ident for ident in (main, *others) if ident in frames][:MAX_THREADS]
    return {names.get(ident or 0, str(ident)): stack_of(frames.get(ident or 0)) for ident in threads}


class _FailedThread(NamedTuple):
    """A thread that an uncaught error has ended."""

    name: str
    error: str
    at_s: float

    def __str__(self) -> str:
        return f"thread {self.name!r} ended {time.monotonic() - self.at_s:.1f} s ago with {self.error}"


failed_threads: "collections.deque[_FailedThread]" = collections.deque(maxlen=MAX_FAILED_THREADS)


def note_failed_thread(args: threading.ExceptHookArgs) -> None:
    """Keep what has ended a thread, for the hang reports: other ranks may wait for what it did not do."""
    if args.exc_type is SystemExit:  # an orderly end
        return
    error = traceback.format_exception_only(args.exc_type, args.exc_value)[-1].strip()
    sites = [
        f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(args.exc_traceback)
        if not frame.f_code.co_filename.startswith(NOT_THE_PROGRAM)
    ]
    name = args.thread.name if args.thread is not None else "?"
    failed_threads.append(_FailedThread(name, ", at ".join([error, *sites[-1:]]), time.monotonic()))
