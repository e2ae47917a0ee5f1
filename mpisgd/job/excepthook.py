"""`ExceptHook`: an uncaught exception ends the job; one rank prints it, all ranks stop.

Without this, mpi4py lets a rank that raised leave quietly while the others wait for it for ever; and when
all eight ranks make the same mistake, eight tracebacks come at once.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpisgd import config, tracing
from mpisgd.call_site import LIBRARIES
from mpisgd.core.topology import Topology
from mpisgd.errors import CollectiveMismatch, JobError, MpisgdError
from mpisgd.monitor.console import ConsoleLock
from mpisgd.monitor.rank_snapshot import failed_threads, note_failed_thread
from mpisgd.standard_error import print_error

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["ExceptHook", "shorten_tracebacks"]

# The rank that should print has so long to do so and to end the job; whoever outlives it ends the job.
PRECEDENCE_S = 0.5
# An error that all ranks raise, such as a deadlock, reaches other hosts when they next look for messages,
# which they do every second, and under load later.
OTHER_HOSTS_S = 4.0
LAST_RESORT_S = 10.0
CHECK_OF_ARGUMENTS = "_check_arguments"  # its TypeError is the caller's, as it would be from Python itself
MPI4PY = os.sep + "mpi4py" + os.sep
REPORT_S = 8.0  # a hang report that is under way takes that long at most


class ExceptHook:
    """The exception hooks of one initialised job.

    A thread of the user's that an exception ends does not end the job, as in plain Python; hang reports tell
    of it.

    Args:
        communicator: of the job's world.
        topology: of the job.
        console: claimed by the rank of each host that prints.
        abort: ends every process of the job with an exit code.
        progress: returns a number that grows as the program goes on.

    Attributes:
        leaving: see `Job.leaving`: where there is anything in it, this process ends alone.
    """

    def __init__(
        self,
        communicator: "Communicator",
        topology: Topology,
        console: ConsoleLock,
        abort: Callable[[int], None],
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        self.leaving: list[Callable[[], None]] = []
        self._abort = abort
        self._progress = progress
        self._pid = os.getpid()
        self._is_removed = False
        self._exit: tuple[int, int] = (0, 0)  # the code that was given to `sys.exit`, and the progress then
        self._communicator = communicator
        self._topology = topology
        self._console = console

    def install(self) -> None:
        """Take over `sys.excepthook`, `threading.excepthook` and `sys.exit`."""
        self._is_removed = False
        self._previous_exit, sys.exit = sys.exit, self._on_exit
        self._previous, self._previous_in_threads = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = self._on_uncaught, self._on_uncaught_in_thread

    def remove(self) -> None:
        """Give the hooks back; where someone else has taken them since, ours only pass on from now on."""
        self._is_removed = True
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous
        if threading.excepthook == self._on_uncaught_in_thread:
            threading.excepthook = self._previous_in_threads
        if sys.exit == self._on_exit:
            sys.exit = self._previous_exit
        failed_threads.clear()

    def _on_exit(self, status: Any = None, /) -> NoReturn:
        """Note the exit code that the program wants: other ranks may still be in the middle of something."""
        if threading.current_thread() is threading.main_thread() and os.getpid() == self._pid:
            code = status & 0xFF if isinstance(status, int) else int(status is not None)
            self._exit = code, self._progress()
        raise SystemExit(status)

    def exit_code(self) -> int:
        """Return the code of the `sys.exit` that ends the program; 0 where it has caught that and gone on."""
        code, progress = self._exit
        return code if progress == self._progress() else 0

    def _on_uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if not self._is_removed:
            note_failed_thread(args)
        self._previous_in_threads(args)

    def _on_uncaught(
        self, kind: type[BaseException], exc: BaseException, trace: TracebackType | None
    ) -> None:
        if self._is_removed:
            self._previous(kind, exc, trace)
            return
        if os.getpid() != self._pid:  # a child that was forked: its end is not the job's
            self._previous(kind, exc, trace)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # MPI's finalize, which follows in the ordinary way out, would wait for ever
        if isinstance(exc, KeyboardInterrupt):
            self._previous(kind, exc, trace)
            self.end_job(130)
        self.fail(exc)

    def fail(self, exc: BaseException) -> None:
        """Print what went wrong, once, and end the whole job. Does not return.

        Another rank prints first, if it can: the first host's, and the lowest where all raise the same error.
        """
        if self.leaving:
            print_error(f"{self._name} raised, and ends; the job goes on without it: {exc}")
            self.end_job(0)
        is_shared = isinstance(exc, MpisgdError) and exc.on_every_rank
        if is_shared and self._communicator.rank > 0:
            time.sleep(PRECEDENCE_S)
        if self._topology.node_rank > 0:
            time.sleep(OTHER_HOSTS_S if is_shared else PRECEDENCE_S)
        if self._console.claim_error(REPORT_S):
            print_error(self._report(exc))
        else:
            time.sleep(LAST_RESORT_S)  # the rank that prints ends this one before that
        self.end_job(exc.exit_code if isinstance(exc, (JobError, CollectiveMismatch)) else 1)

    def end_job(self, exit_code: int) -> None:
        """End every process of the job, or this one where the others go on without it. Does not return.

        MPI tells the others of a process that ends so if its exit code is 0 (Open MPI 5.0.11).
        """
        tracing.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        if self.leaving:
            for callback in self.leaving:
                callback()
            os._exit(0)
        if self._communicator.size > 1:
            self._abort(exit_code)
        sys.exit(exit_code)  # alone: the ordinary way out, MPI is finalized on it

    @property
    def _name(self) -> str:
        host = self._topology.hostnames[self._topology.node_rank]
        return f"mpisgd: rank {self._communicator.rank} of {self._communicator.size} on {host}"

    def _report(self, exc: BaseException) -> str:
        if isinstance(exc, JobError):
            return f"{Path(sys.argv[0]).name or 'mpisgd'}: error: {exc}"
        report = _formatted(exc)
        if self._communicator.size == 1:
            return report
        return f"{self._name} raised, the job ends:\n{report}"


def shorten_tracebacks() -> None:
    """Print errors of ours in short, as a job does, where there is no job: `init` has failed."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = lambda _, exc, __: print_error(_formatted(exc))


def _formatted(exc: BaseException) -> str:
    """Return an error with its traceback, up to the line of the program that has called us if it is ours."""
    whole = traceback.TracebackException.from_exception(exc)
    is_ours = isinstance(exc, MpisgdError) or (whole.stack and whole.stack[-1].name == CHECK_OF_ARGUMENTS)
    if is_ours and not config.full_traceback():
        frames = list(whole.stack)
        while frames and frames[-1].filename.startswith(LIBRARIES):
            frames.pop()
        whole.stack = traceback.StackSummary.from_list(frames)
        if whole.__cause__ is not None and all(map(_is_library, whole.__cause__.stack)):
            whole.__cause__ = None  # our error says what it said
    return "".join(whole.format()).rstrip()


def _is_library(frame: traceback.FrameSummary) -> bool:
    return (
        frame.filename.startswith((*LIBRARIES, "src/mpi4py/", "<frozen importlib"))
        or MPI4PY in frame.filename
    )
