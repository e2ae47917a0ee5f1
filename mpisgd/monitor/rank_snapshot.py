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
from typing import TYPE_CHECKING

import torch

from mpisgd.accelerator.runtime import runtime
from mpisgd.core import wait_registry
from mpisgd.core.wait_registry import RegisteredWait, WaitReason
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


_OpenGroup = tuple["Group", "OperationQueue", "PointToPoint"]


def _open_groups(groups: Iterable["Group"]) -> list[_OpenGroup]:
    """Return what is read of those that can be used now: another thread may close one meanwhile."""
    found = []
    for group in list(groups):
        with contextlib.suppress(MpisgdError):  # closed, or lost, or this rank is no member
            found.append((group, group.queue, group.point_to_point))
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
    state = RankState(
        rank,
        host,
        os.getpid(),
        WAITS if any(wait.is_main for wait in waits) else RUNS,
        waits,
        _stacks(frames, names) if stacks else {},
        {group_key(group.ranks, group.ordinal): queue.consistency.number for group, queue, _ in opened},
        tuple(message for _, _, messages in opened for message in messages.in_flight()),
        any(may_work() for may_work in list(wait_registry.workers.values()))
        or any(_may_communicate(thread, frames) for thread in threads if thread.name not in waiting),
        sum(queue.consistency.number + messages.num_ended for _, queue, messages in opened),
        tuple(reported),
        tuple(
            f"thread {name!r} ended {time.monotonic() - at_s:.1f} s ago with {error}"
            for at_s, name, error in failed_threads
        ),
        device_bytes=runtime().memory_in_use(),
    )
    frames.clear()  # this function's own is in it: the cycle would keep what all threads have in theirs
    return state


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
    operations = {}
    for group, queue, _ in groups:
        if (running := queue.running) is not None:
            operations[running.thread] = running, group, queue
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
    operation: "tuple[RunningOperation, Group, OperationQueue] | None",
) -> Wait:
    """Put together one thread's wait: the outermost says what for, the innermost the timeout."""
    now_s = time.monotonic()
    call, since_s = mpi_call or ("", now_s)
    since_s = min(since_s, *(wait.since_s for wait in registered), now_s)
    timeouts_s = [wait.timeout_s for wait in registered if wait.timeout_s != wait_registry.NO_TIMEOUT_S]
    reasons = [wait.reason() for wait in registered if wait.reason is not None]
    timeout_s, site = timeouts_s[-1] if timeouts_s else None, ""
    if reasons:
        reason = reasons[0]
    elif operation is not None:
        running, group, queue = operation
        check = queue.consistency
        timeout_s, site = timeout_s or check.timeout_s, running.site()
        what = str(running.operation)
        reason = WaitReason(what, group.name, (), group.ranks, check.number, group.ordinal)
    else:
        reason = WaitReason(f"MPI {call}" if call else "other ranks")
    serial = wait_registry.serial_of(since_s)
    return Wait(
        **vars(reason), site=site, waited_s=now_s - since_s, timeout_s=timeout_s, mpi_call=call, serial=serial
    )


def _site(frame: FrameType | None) -> str:
    """Return the line of the program that a thread is at, or came from."""
    while frame is not None and not _in_program(frame):
        frame = frame.f_back
    return _line(frame, frame.f_lineno) if frame is not None else ""


def _in_program(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(NOT_THE_PROGRAM)


def _line(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


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


# Threads that an uncaught error has ended: when, the thread's name, and the error with its place.
failed_threads: "collections.deque[tuple[float, str, str]]" = collections.deque(maxlen=MAX_FAILED_THREADS)


def note_failed_thread(args: threading.ExceptHookArgs) -> None:
    """Keep what has ended a thread, for the hang reports: other ranks may wait for what it did not do."""
    if args.exc_type is SystemExit:  # an orderly end
        return
    error = traceback.format_exception_only(args.exc_type, args.exc_value)[-1].strip()
    sites = [
        _line(frame, line) for frame, line in traceback.walk_tb(args.exc_traceback) if _in_program(frame)
    ]
    name = args.thread.name if args.thread is not None else "?"
    failed_threads.append((time.monotonic(), name, ", at ".join([error, *sites[-1:]])))
