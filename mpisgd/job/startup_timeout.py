"""Timeouts of what no stall monitor sees: the start of the job, its end, and what is between two worlds.

Before the ranks know of each other none can be asked, and MPI's own start and end can neither be interrupted
nor cancelled: what is left is to end this process, at which the launcher ends the job. Where it does not,
after the loss of a rank, the caller knows what does.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from mpisgd import config
from mpisgd.monitor.rank_snapshot import MONITOR_THREAD, stack_of
from mpisgd.standard_error import print_to_user
from mpisgd.threads import wait_registry
from mpisgd.threads.service_thread import ServiceThread

__all__ = ["set_alarm", "within"]

LEAST_S = 60.0  # a job's start takes time of its own, however short the timeout of operations is
GRACE_S = 2.0  # by the signal it ends without a word, so our own comes first


@contextlib.contextmanager
def within(
    limit_s: float,
    what: str,
    *,
    parts: int = 1,
    end: Callable[[int], None] = os._exit,
    exit_code: int = 1,
) -> Iterator[None]:
    """End the job if this takes longer; only where there are other ranks to wait for. May be nested.

    Args:
        limit_s: seconds that it may take, LEAST_S at least.
        what: this is, for the message.
        parts: how often it may take that. What has a part with a limit of its own has two, so that the part
            ends first, with its message and code.
        end: ends the job with an exit code, where the end of this process alone would not.
        exit_code: which.
    """
    if config.starts_alone():
        yield
        return
    limit_s = parts * max(limit_s, LEAST_S)
    over, alarm = threading.Event(), set_alarm(limit_s + GRACE_S)

    def watch() -> bool:
        if not over.wait(limit_s):
            _end_late_job(limit_s, what, end, exit_code)
        return False

    thread = ServiceThread(MONITOR_THREAD, watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _end_late_job(limit_s: float, what: str, end: Callable[[int], None], exit_code: int) -> None:
    """Report where the job is, and end it, also where that raises."""
    try:
        print_to_user(_report(limit_s, what))
        end(exit_code)
    except Exception:
        os._exit(exit_code)


def _report(limit_s: float, what: str) -> str:
    main = threading.main_thread().ident or 0
    call, _ = wait_registry.mpi_calls.get(main, ("", 0.0))
    inside = f", inside MPI's {call}" if call else ""
    return (
        f"rank {config.launcher_rank()} has been in {what} for {limit_s:g} s, which is the limit "
        f"(MPISGD_TIMEOUT_S, a minute at least){inside}: another rank does not come, or its host "
        "cannot be reached. The job ends. It is here (the innermost call last):\n"
        f"{stack_of(sys._current_frames().get(main))}"
    )


def set_alarm(limit_s: float) -> bool:
    """End the process by SIGALRM if it lives longer from now on; return whether that could be had.

    For MPI's start, during which mpi4py keeps the interpreter's lock, and its end, which comes after the
    interpreter's own: no thread of Python's can watch. A program that uses this signal itself keeps it.
    """
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL or any(signal.getitimer(signal.ITIMER_REAL)):
        return False
    signal.setitimer(signal.ITIMER_REAL, max(limit_s, LEAST_S))
    return True
