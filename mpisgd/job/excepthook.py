"""What ends a job whose program failed: one rank speaks, all ranks stop.

Without this, mpi4py lets a rank that raised leave quietly while the others wait for it for ever; and when
all eight ranks make the same mistake, eight tracebacks come at once.
"""

import fcntl
import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from mpisgd import tracing
from mpisgd.core.topology import Topology
from mpisgd.errors import JobError, MpisgdError
from mpisgd.transport.ipc.memfd import open_shared

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["ExceptHook", "say_to_user"]

# Give the rank that should speak this long to do so and to end the job; whoever outlives it speaks itself.
PRECEDENCE_S = 0.5
LAST_RESORT_S = 10.0


class ExceptHook:
    """The exception hook of one initialised job. `install()` and `remove()` are not collective.

    Making one is collective: the ranks of a host open one nameless file, and who locks it first and writes to
    it speaks for that host. Nothing of it remains, whatever way the processes end.

    Attributes:
        abort: ends every process of the job with an exit code.
    """

    def __init__(self, wire: "Communicator", topology: Topology) -> None:
        self.abort: Callable[[int], None] = wire.abort
        self._wire = wire
        self._topology = topology
        self._floor = _open_together(wire)
        self._previous = sys.excepthook

    def install(self) -> None:
        """Take over `sys.excepthook`."""
        self._previous = sys.excepthook
        sys.excepthook = self._on_uncaught

    def remove(self) -> None:
        """Give `sys.excepthook` back, unless someone else has taken it since."""
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous

    def close(self) -> None:
        """Give the file back; after that this rank speaks for itself."""
        if self._floor is not None:
            os.close(self._floor)
            self._floor = None

    def _on_uncaught(
        self, kind: type[BaseException], exc: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(exc, KeyboardInterrupt):
            self._previous(kind, exc, trace)
            self.end_job(130)
        self.fail(exc)

    def fail(self, exc: BaseException) -> None:
        """Say what went wrong, once, and end the whole job. Does not return."""
        self._give_precedence(exc)
        if self._claim():
            print(self._report(exc), file=_unredirected(), flush=True)
        else:
            time.sleep(LAST_RESORT_S)  # the speaker ends us before that
        self.end_job(exc.exit_code if isinstance(exc, JobError) else 1)

    def end_job(self, exit_code: int) -> None:
        """End every process of the job. Does not return."""
        tracing.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        if self._wire.size > 1:
            self.abort(exit_code)
        sys.exit(exit_code)  # alone: the ordinary way out, MPI is finalized on it

    def _give_precedence(self, exc: BaseException) -> None:
        """Let another rank speak first: the first host's, and the lowest where all raise the same error."""
        if isinstance(exc, MpisgdError) and exc.on_every_rank and self._wire.rank > 0:
            time.sleep(PRECEDENCE_S)
        if self._topology.node_rank > 0:
            time.sleep(PRECEDENCE_S)

    def _claim(self) -> bool:
        """Return whether this rank is to speak. A lock goes with its owner, what is in a file stays."""
        if self._floor is None:
            return True
        try:
            fcntl.flock(self._floor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        if os.fstat(self._floor).st_size:
            return False  # somebody has spoken, and is gone already
        os.write(self._floor, b"!")
        return True

    def _report(self, exc: BaseException) -> str:
        if isinstance(exc, JobError):
            return f"{Path(sys.argv[0]).name or 'mpisgd'}: error: {exc}"
        who = f"rank {self._wire.rank} of {self._wire.size}"
        host = self._topology.hostnames[self._topology.node_rank]
        report = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__)).rstrip()
        return report if self._wire.size == 1 else f"mpisgd: {who} on {host} raised, the job ends:\n{report}"


def say_to_user(text: str) -> None:
    """Print what the user should know about the job, in one piece."""
    print(f"mpisgd: {text}", file=_unredirected(), flush=True)


def _unredirected() -> TextIO:
    """Return the standard error of the process: torch.distributed's hook collects what others print.

    It would put its own mark in front of it after they return, and we do not.
    """
    collected = isinstance(sys.stderr, io.StringIO)
    return sys.__stderr__ if collected and sys.__stderr__ is not None else sys.stderr


def _open_together(wire: "Communicator") -> int | None:
    """Return a file without a name that all ranks of this host have open. Collective.

    None where it cannot be had, as in a container of its own: such a rank speaks for itself.
    """
    local = wire.same_host()
    floor = open_shared(local, 0)
    local.barrier()  # the first rank's own must stay until the others have opened it
    local.free()
    return floor if floor >= 0 else None
