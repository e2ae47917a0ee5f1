"""This process's own view: what its threads wait for, and their stacks."""

import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from mpisgd.core import wait_registry
from mpisgd.core.wait_registry import Waiter
from mpisgd.monitor.rank_state import RUNS, WAITS, RankState, Wait

if TYPE_CHECKING:
    from mpisgd.core.group import Group
    from mpisgd.core.operation_queue import Underway

__all__ = ["group_key", "look", "stack_of"]

MOST_FRAMES = 24
MOST_THREADS = 32
WATCH_THREAD = "mpisgd watch"
WAITING = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "waiting.py"),
)
# A call site is a line of the program: neither ours nor torch's.
NOT_THE_PROGRAM = (
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(threading.__file__)) + os.sep,
)
STANDARD_LIBRARY = NOT_THE_PROGRAM[2]


def group_key(ranks: Sequence[int], ordinal: int) -> str:
    """Return what a group is known by on all of its ranks, which may have different names for it."""
    return f"[{','.join(map(str, ranks))}] {ordinal}"


def look(
    rank: int, host: str, groups: Sequence["Group"], told: Sequence[int] = (), *, stacks: bool = True
) -> RankState:
    """Return what this process does right now.

    Args:
        rank: its global rank.
        host: name of this host.
        groups: those it is a member of.
        told: see `RankState.told`.
        stacks: whether they are wanted.
    """
    frames = sys._current_frames()
    threads = threading.enumerate()
    names = {thread.ident or 0: thread.name for thread in threads}
    everyone = tuple(_waits(groups, frames, names))
    waiting = {wait.thread for wait in everyone}
    return RankState(
        rank,
        host,
        os.getpid(),
        WAITS if any(wait.main for wait in everyone) else RUNS,
        everyone,
        _stacks(frames, names) if stacks else {},
        {group_key(group.ranks, group.ordinal): group.queue.consistency.number for group in groups},
        tuple(message for group in groups for message in group.point_to_point.in_flight()),
        any(has_something_to_do() for has_something_to_do in list(wait_registry.workers.values()))
        or any(_is_free(thread, frames) for thread in threads if thread.name not in waiting),
        sum(group.queue.consistency.number + group.point_to_point.num_ended for group in groups),
        tuple(told),
    )


def _is_free(thread: threading.Thread, frames: Mapping[int, FrameType]) -> bool:
    """Return whether a thread that is not in one of our waits may go on to communicate, as far as is known.

    One of our own does unless it is idle. One of the user's does if it ever has; if it has not, it is taken
    to be about to while it runs code of the program.
    """
    frame = frames.get(thread.ident or 0)
    if thread is threading.main_thread() or thread.name == WATCH_THREAD or frame is None:
        return False
    if thread.ident in wait_registry.workers:  # they tell it themselves
        return False
    idle = frame.f_code.co_filename.startswith(STANDARD_LIBRARY)
    if thread.name.startswith("mpisgd"):
        return not idle
    return wait_registry.has_communicated(thread) or (not idle and bool(_site(frame)))


def _waits(
    groups: Sequence["Group"], frames: Mapping[int, FrameType], names: Mapping[int, str]
) -> list[Wait]:
    """Return one entry per waiting thread and reason, the longest wait first."""
    inside = wait_registry.inside_mpi()
    noted: dict[int, list[Waiter]] = defaultdict(list)
    for waiter in wait_registry.noted():
        noted[waiter.thread].append(waiter)
    running = [(group, group.queue.underway) for group in groups]
    operations = {underway.thread: (group, underway) for group, underway in running if underway is not None}
    found = []
    for thread in noted.keys() | inside.keys():
        wait = _wait(noted.get(thread, []), inside.get(thread), operations.get(thread))
        site = wait.site or _site(frames.get(thread))
        named = {"thread": names.get(thread, str(thread)), "main": thread == threading.main_thread().ident}
        found.append(Wait(**{**wait.__dict__, "site": site, **named}))
    return sorted(found, key=lambda wait: -wait.waited_s)


def _wait(
    waiters: Sequence[Waiter], inside: tuple[str, float] | None, operation: "tuple[Group, Underway] | None"
) -> Wait:
    """Put together one thread's wait: the outermost says what for, the innermost the limit."""
    now_s = time.monotonic()
    call, since_s = inside or ("", now_s)
    since_s = min(since_s, *(waiter.since_s for waiter in waiters), now_s)
    limits_s = [waiter.limit_s for waiter in waiters if waiter.limit_s != wait_registry.NO_LIMIT_S]
    hints = [waiter.about() for waiter in waiters if waiter.about is not None]
    common: dict[str, Any] = {
        "waited_s": now_s - since_s,
        "limit_s": limits_s[-1] if limits_s else None,
        "inside": call,
        "serial": wait_registry.serial_of(since_s),
    }
    if hints:
        return Wait(**hints[0]._asdict(), **common)
    if operation is not None:
        group, underway = operation
        common["limit_s"] = common["limit_s"] or group.queue.consistency.timeout_s
        number, site = group.queue.consistency.number, underway.site()
        common["ordinal"] = group.ordinal
        return Wait(str(underway.operation), group.name, group.ranks, number, (), site, **common)
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
    return "".join(traceback.format_stack(frame, MOST_FRAMES)) if frame is not None else ""


def _stacks(frames: Mapping[int, FrameType], names: Mapping[int, str]) -> dict[str, str]:
    """Return the stacks of all threads but this mechanism's own, the main thread's first."""
    main = threading.main_thread().ident
    others = [ident for ident in frames if ident != main and names.get(ident) != WATCH_THREAD]
    threads = [ident for ident in (main, *others) if ident in frames][:MOST_THREADS]
    return {names.get(ident or 0, str(ident)): stack_of(frames.get(ident or 0)) for ident in threads}
