"""How a framework's process comes to stand beside each rank.

Most want nothing but a process. Horovod is at its best over MPI, and a rank's child cannot be a rank: these
are the ranks of a second job, one for each rank of this one, to whom they report over a socket.

    mpirun -n 2 python -m mpisgd bench     rank 0 ========== rank 1
              rank 0 starts |                | socket 0        | socket 1
    mpirun -n 2 python -m mpisgd.bench.child rank 0 ========== rank 1
"""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import mpisgd
from mpisgd.bench.jobs import OVERSUBSCRIBE, mpirun
from mpisgd.bench.measure import Unavailable
from mpisgd.errors import JobError

__all__ = ["Process", "start_beside", "start_in_job"]

CONNECT_LIMIT_S = 60.0
GIVEN_UP = "given-up"  # a file that tells all ranks
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL")
KEPT = ("OMPI_ALLOW_RUN_AS_ROOT",)
# The second job's ranks share the cores of the first one's, who see to that themselves.
SECOND_JOB = {**OVERSUBSCRIBE, "PRTE_MCA_hwloc_default_binding_policy": "none"}
# Runs a command that is ended with its parent, whatever ends that.
TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"


class Process:
    """A process beside this rank.

    Args:
        connection: to it.
        pid: its number.
        launched: what this rank has started: the process, the launcher of all of them, or nothing.
        errors: what that says.

    Attributes:
        connection: see there.
    """

    def __init__(
        self, connection: Connection, pid: int, launched: "subprocess.Popen[bytes] | None", errors: Any
    ) -> None:
        self.connection = connection
        self._pid, self._launched, self._errors = pid, launched, errors

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def last_words(self) -> str:
        """Return how it ended and the last line it said, as far as this rank can know."""
        if self._launched is None:
            return "rank 0 knows more"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launched.wait(5)
        return f"exit code {self._launched.returncode}, {_last_line(self._errors)}"

    def end(self) -> None:
        """Hang up, and see that it ends."""
        self.connection.close()
        self.send_signal(signal.SIGCONT)
        if self._launched is not None:
            _end(self._launched)


def _last_line(file: Any) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _end(process: "subprocess.Popen[bytes]") -> None:
    for insist in (process.poll, process.terminate, process.kill):
        insist()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return


def _program(where: str, framework: str) -> list[str]:
    return [sys.executable, "-m", "mpisgd.bench.child", where, framework, str(torch.get_num_threads())]


def _outside() -> dict[str, str]:
    """Return the environment without what makes this process a rank."""
    return {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES) or k.startswith(KEPT)}


def _start(command: Sequence[str], more: dict[str, str], fds: Sequence[int] = ()) -> Any:
    """Return a started process, and the file in which its errors go."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
    process = subprocess.Popen(
        command,
        env={**more, **_outside()},
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
    )
    return process, errors


def start_beside(framework: str) -> Process:
    """Start a process of this rank's own."""
    connection, theirs = Pipe()
    process, errors = _start(_program(str(theirs.fileno()), framework), {}, [theirs.fileno()])
    theirs.close()
    return Process(connection, process.pid, process, errors)


def start_in_job(framework: str) -> Process:
    """Start a second job, with a rank of it for every rank; all of them on one host. Collective.

    Raises:
        Unavailable: it did not come up; on every rank.
    """
    with tempfile.TemporaryDirectory() as own:
        folder = Path(mpisgd.broadcast_object(own))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / f"rank-{mpisgd.rank()}"))
            listener.listen()
            mpisgd.barrier()
            launched, errors = _launch(framework, folder) if mpisgd.rank() == 0 else (None, None)
            met = _accept(listener, folder, launched)
        everyone: list[bool] = [False] * mpisgd.size()
        mpisgd.all_gather_object(everyone, met is not None)  # and nobody needs the folder any more
    if met is None or not all(everyone):
        raise Unavailable(_why_not(launched, errors))
    pid, _, _ = struct.unpack("3i", met.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    with contextlib.suppress(ProcessLookupError):  # it may have failed by now; whoever asks it will be told
        os.sched_setaffinity(pid, os.sched_getaffinity(0))
    return Process(Connection(met.detach()), pid, launched, errors)


def _launch(framework: str, folder: Path) -> Any:
    try:
        command = [*mpirun(), "-n", str(mpisgd.size()), *_program(str(folder), framework)]
    except JobError:  # no mpirun, so none that would have started this job
        (folder / GIVEN_UP).touch()
        return None, None
    return _start([sys.executable, "-c", TIED, *command], SECOND_JOB)


def _accept(
    listener: socket.socket, folder: Path, launched: "subprocess.Popen[bytes] | None"
) -> socket.socket | None:
    """Return the connection to this rank's process; None where rank 0 sees the job end, or nothing comes."""
    listener.settimeout(0.1)
    deadline = time.monotonic() + CONNECT_LIMIT_S
    while time.monotonic() < deadline and not (folder / GIVEN_UP).exists():
        with contextlib.suppress(TimeoutError):
            return listener.accept()[0]
        if launched is not None and launched.poll() is not None:
            (folder / GIVEN_UP).touch()
    return None


def _why_not(launched: "subprocess.Popen[bytes] | None", errors: Any) -> str:
    """Return on every rank why rank 0's second job did not come up; it is ended. Collective."""
    reason = "there is no mpirun for a second job"
    if launched is not None:
        launched.terminate()
        _end(launched)
        reason = f"its job did not come up: {_last_line(errors)}"
    return str(mpisgd.broadcast_object(reason))
