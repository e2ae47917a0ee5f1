"""Which threads are certainly idle: they do nothing until another thread of this process has them do it.

Only these may be left out when ranks are told that they can never go on. A thread that waits for a lock, an
event or a queue is idle, as whoever could wake it is looked at, too. One that waits for anything else (a
socket, a subprocess, another process's queue, C code) or until a time goes on by itself, and may communicate
next.
"""

import os
import queue
import threading
from concurrent.futures import thread as executor
from types import FrameType

from mpisgd.threads import wait_registry

__all__ = ["may_communicate"]

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
THREADING = threading.Event.wait.__code__.co_filename
WAITS = (THREADING, queue.Queue.get.__code__.co_filename)
# The functions in whose C calls a thread waits for another one; an executor's worker does for its next item.
CONDITION = threading.Condition.wait.__code__
JOINS = [
    function.__code__
    for name in ("join", "_wait_for_tstate_lock")
    if (function := getattr(threading.Thread, name, None)) is not None
]
EXECUTOR = executor._worker.__code__
NO_LIMIT = (None, -1)  # as Python's own functions write it
# Libraries whose threads never call code of the program: progress bars, the DataLoader's pinned memory,
# torch.compile, timeouts of tests.
CALL_NOBODY = ("tqdm._monitor", "torch.utils.data._utils.pin_memory", "torch._inductor.", "pytest_timeout")


def may_communicate(thread: threading.Thread | None, ident: int, frame: FrameType) -> bool:
    """Return whether a thread that is not in one of our waits may go on to communicate, as far as is known.

    Args:
        thread: None where Python did not start it.
        ident: its identifier.
        frame: its innermost one.
    """
    if ident == threading.main_thread().ident or ident in wait_registry.workers:  # these tell it themselves
        return False
    first = _first_function(frame)
    if thread is not None and wait_registry.has_communicated(thread) and not _is_ours(first):
        return True
    return not (_is_idle(frame) or _module(thread, first).startswith(CALL_NOBODY))


def _first_function(frame: FrameType) -> FrameType | None:
    """Return the outermost frame that is not Python's own beginning of a thread."""
    first: FrameType | None = None
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_code.co_filename != THREADING:
            first = outer
        outer = outer.f_back
    return first


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def _module(thread: threading.Thread | None, first: FrameType | None) -> str:
    """Return the name of the module whose function a thread runs, or a timer is going to."""
    if isinstance(thread, threading.Timer) and first is None:
        return str(getattr(thread.function, "__module__", ""))
    return "" if first is None else str(first.f_globals.get("__name__", ""))


def _is_idle(frame: FrameType) -> bool:
    """Return whether a thread waits for another one of this process, without a limit.

    One of ours may have a limit: it serves others, and calls no operation when it is over.
    """
    if frame.f_code is EXECUTOR:
        items = frame.f_locals.get("work_queue")
        return items is not None and bool(items.empty())
    if frame.f_code is CONDITION:
        waiter = frame.f_locals.get("waiter")
        if waiter is None or not waiter.locked():  # has been woken
            return False
    elif frame.f_code not in JOINS:
        return False
    outer: FrameType | None = frame
    has_limit = False
    while outer is not None and outer.f_code.co_filename in WAITS:
        has_limit = has_limit or outer.f_locals.get("timeout") not in NO_LIMIT
        outer = outer.f_back
    return not has_limit or _is_ours(outer)
