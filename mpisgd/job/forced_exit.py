"""How a process exits whose job has lost ranks: MPI's own finalize may wait for them for ever.

Open MPI 5.0 counts the ranks of a lost host among those that still run, and its finalize waits for them. So
the ranks exit without it, and the child of `mpirun` kills `mpirun`. Where single ranks were lost finalize
works, as a rule: after the loss of one that had replaced another it now and then does not return.
"""

import contextlib
import os
import signal
import sys
import time
from typing import Any

import psutil

from mpisgd.config import ENDED_NOTE, note
from mpisgd.standard_error import print_to_user

__all__ = ["exit_after_loss", "exit_without_host"]

LAUNCHERS = ("prterun", "mpirun", "mpiexec", "prte")
OTHERS_LEAVE_S = 1.0
FINALIZE_S = 5.0
FORWARD_S = 0.3  # mpirun forwards what was printed to the terminal


class _Alarm:
    """Sets the alarm when it is let go of."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    # As defaults: names of modules may be gone by then.
    def __del__(self, set_timer: Any = signal.setitimer, which: int = signal.ITIMER_REAL) -> None:
        set_timer(which, self._limit_s)


at_last: list[_Alarm] = []


def exit_after_loss() -> None:
    """Limit MPI's own finalize to a few seconds, by SIGALRM; call when all ranks are leaving.

    Finalize comes after Python's own end, and after the handlers of `atexit` that the program registered
    before `init()`, which may take their time: the alarm is set when Python lets go of its modules.
    """
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        at_last.append(_Alarm(FINALIZE_S))


def exit_without_host(local_rank: int) -> None:
    """Exit at once, with success; call when all ranks are leaving. Does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(psutil.Error):
        launcher = psutil.Process(os.getppid())
        if local_rank == 0 and launcher.name() in LAUNCHERS:
            time.sleep(OTHERS_LEAVE_S)
            note(ENDED_NOTE)
            print_to_user(
                "the program has ended with exit code 0. mpirun would wait for the lost host for ever and is "
                "killed, so its own exit code is 137"
            )
            time.sleep(FORWARD_S)
            launcher.kill()
    os._exit(0)
