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
from mpisgd.core.mismatch import in_short
from mpisgd.errors import MpisgdError
from mpisgd.monitor.idle_threads import may_communicate
from mpisgd.monitor.rank_state import RUNS, WAITS, RankState, Wait, group_key
from mpisgd.threads import wait_registry, waiting
from mpisgd.threads.wait_registry import RegisteredWait, RunningCallback, WaitReason

if TYPE_CHECKING:
    from mpisgd.core.group import Group
    from mpisgd.core.operation_queue import OperationQueue
    from mpisgd.core.submission import Submission
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
WAITING = (HERE, waiting.__file__)
# A call site is a line of the program: neither ours nor torch's.
NOT_THE_PROGRAM = (PACKAGE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, STANDARD_LIBRARY)


_OpenGroup = tuple["Group", "OperationQueue", "PointToPoint"]


def _open_groups(groups: Iterable["Group"]) -> list[_OpenGroup]:
    """Return the groups that can be used now, as they are read: another thread may close one meanwhile."""
    found = []
    for group in list(groups):
        with contextlib.suppress(MpisgdError):  # closed, or lost, or this rank is no member
            found.append((group, group.queue, group.point_to_point))
    return found


def take_snapshot(
    rank: int, host: str, groups: Iterable["Group"], reported: Sequence[int] = (), *, stacks: bool = True
) -> RankState:
    """Return the state of this process.

    Args:
        rank: its global rank.
        host: name of this host.
        groups: of the job; those that it can use are examined.
        reported: see `RankState.reported`.
        stacks: whether they are wanted.
    """
    frames = sys._current_frames()
    threads = {thread.ident or 0: thread for thread in threading.enumerate()}
    names = {ident: thread.name for ident, thread in threads.items()}
    opened = _open_groups(groups)
    by_thread = _waits(opened, frames, names)
    waits = tuple(sorted(by_thread.values(), key=lambda wait: -wait.waited_s))
    others = [ident for ident in frames if ident not in by_thread and names.get(ident) != MONITOR_THREAD]
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
        or any(may_communicate(threads.get(ident), ident, frames[ident]) for ident in others),
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


def _waits(
    groups: Sequence[_OpenGroup], frames: Mapping[int, FrameType], names: Mapping[int, str]
) -> dict[int, Wait]:
    """Return one entry per waiting thread, by its identifier: threads may have the same name."""
    mpi_calls = dict(wait_registry.mpi_calls)
    by_thread: dict[int, list[RegisteredWait]] = collections.defaultdict(list)
    for registered in wait_registry.registered():
        by_thread[registered.thread].append(registered)
    operations = {}
    for group, queue, _ in groups:
        if (running := queue.running) is not None:
            operations[running.thread] = running, group, queue
    found: dict[int, Wait] = {}
    for thread in by_thread.keys() | mpi_calls.keys():
        found[thread] = _wait(by_thread.get(thread, []), mpi_calls.get(thread), operations.get(thread))
    for thread, callback in dict(wait_registry.callbacks).items():
        found.setdefault(thread, _wait_of_callback(callback))
    for thread, wait in found.items():
        site = wait.site or _site(frames.get(thread))
        is_main = thread == threading.main_thread().ident
        found[thread] = replace(wait, site=site, thread=names.get(thread, str(thread)), is_main=is_main)
    return found


def _wait(
    registered: Sequence[RegisteredWait],
    mpi_call: tuple[str, float] | None,
    operation: "tuple[Submission, Group, OperationQueue] | None",
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
        what = in_short(str(running.operation))
        reason = WaitReason(what, group.name, (), group.ranks, check.number, group.ordinal)
    else:
        reason = WaitReason(f"MPI {call}" if call else "other ranks")
    return Wait(
        **vars(reason),
        site=site,
        waited_s=now_s - since_s,
        timeout_s=timeout_s,
        mpi_call=call,
        serial=wait_registry.serial_of(since_s),
        own_limit=any(wait.own_limit for wait in registered),
    )


def _wait_of_callback(callback: RunningCallback) -> Wait:
    """Describe a running callback of the program as a wait: others wait for its end."""
    return Wait(
        f"a callback on the future of {callback.name}",
        callback.group,
        waited_s=time.monotonic() - callback.since_s,
        timeout_s=callback.timeout_s,
        serial=wait_registry.serial_of(callback.since_s),
        own_limit=True,
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
