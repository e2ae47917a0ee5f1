"""`Peer`: the process of another framework beside this rank, and the two ways of starting it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Client, Connection
from typing import Any, NoReturn

import psutil
import torch

import mpisgd
from mpisgd.bench.jobs import OVERSUBSCRIBE, Job, mpirun
from mpisgd.bench.measure import Unavailable
from mpisgd.bench.peers.framework import Rendezvous

__all__ = ["Peer", "start_beside", "start_in_job"]

START_LIMIT_S = 120.0
ANSWER_LIMIT_S = 90.0
# They keep a thread busy even between requests.
BUSY = ("horovod",)
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL")
KEPT = ("OMPI_ALLOW_RUN_AS_ROOT",)
# Each of the second job's ranks takes the cores of the rank that it belongs to.
SECOND_JOB = {**OVERSUBSCRIBE, "PRTE_MCA_hwloc_default_binding_policy": "none"}
# Runs a command that gets a signal (PR_SET_PDEATHSIG) when its parent ends, whatever ends that.
END_WITH_PARENT = """
import ctypes, os, sys
_, end, *command = sys.argv
ctypes.CDLL(None).prctl(1, int(end))
os.execvp(command[0], command)
"""


class Peer:
    """The process beside this rank that runs one framework.

    Args:
        framework: one of FRAMEWORKS.
        connection: to it.
        job: what this rank has started: the process, the launcher of all of them, or nothing.

    Attributes:
        broken: why it is gone, "" while it is there.
    """

    def __init__(self, framework: str, connection: Connection, job: Job | None) -> None:
        self.broken = ""
        self._framework = framework
        self._connection, self._job = connection, job
        self._process: psutil.Process | None = None

    def load(self, rendezvous: Rendezvous) -> str:
        """Let it import its framework and meet the others; return the version. Collective.

        Raises:
            Unavailable: as `ask`.
        """
        cores, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
        task = (self._framework, cores, num_threads, rendezvous)
        pid, version = self.ask("load", *task, limit_s=START_LIMIT_S)
        self._process = psutil.Process(pid)
        return str(version)

    def ask(self, method: str, *args: Any, limit_s: float = ANSWER_LIMIT_S) -> Any:
        """Request something and return the answer.

        Raises:
            Unavailable: it cannot, has ended or did not answer in time; after the last two it is gone.
            WrongResult: see `Variant.check`.
        """
        if self.broken:
            raise Unavailable(self.broken)
        try:
            self._connection.send((method, args))
            if not self._connection.poll(limit_s):
                self._fail(f"no answer within {limit_s:.0f} s")
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._fail(f"its process ended: {self._job.exit_report() if self._job else 'rank 0 knows more'}")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _fail(self, reason: str) -> NoReturn:
        self.broken = reason
        self.close()
        raise Unavailable(reason)

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Let a busy one run in here, until those of all ranks are done; then it is stopped. Collective."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            if self._framework in BUSY:
                mpisgd.barrier()
                self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self._framework in BUSY and self._process is not None:
            with contextlib.suppress(psutil.Error):
                self._process.send_signal(number)

    def close(self) -> None:
        """Disconnect, and make sure that it ends."""
        self._connection.close()
        self._signal(signal.SIGCONT)
        if self._job is not None:
            self._job.end()


def start_beside(framework: str, folder: str) -> Peer:
    """Start a process of this rank's own; its socket lies in `folder` until it is connected.

    Raises:
        Unavailable: it did not come up.
    """
    job = Job(_ended_with_parent(_worker(folder), signal.SIGKILL), _without_launcher())
    return Peer(framework, _connect(f"{folder}/0", job), job)


def start_in_job(framework: str, folder: str) -> Peer:
    """Start a second job, with a rank of it for every rank; all of them on one host. Collective.

    Raises:
        Unavailable: it did not come up; on all ranks, if it is the whole job.
    """
    folder, rank = mpisgd.broadcast_object(folder), mpisgd.rank()
    peer, reason = None, ""
    if rank == 0:
        try:
            command = [*mpirun(), "-n", str(mpisgd.size()), *_worker(folder)]
            job = Job(_ended_with_parent(command, signal.SIGTERM), {**SECOND_JOB, **_without_launcher()})
            peer = Peer(framework, _connect(f"{folder}/0", job), job)
        except (Unavailable, mpisgd.JobError) as exc:
            reason = f"its job did not come up: {exc}"
    if reason := mpisgd.broadcast_object(reason):
        raise Unavailable(reason)
    return peer or Peer(framework, _connect(f"{folder}/{rank}", None), None)


def _connect(address: str, job: Job | None) -> Connection:
    """Return the connection to the process that listens there, once it does; end its job if it does not."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and (job is None or job.is_running()):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return Client(address)
        time.sleep(0.02)
    if job is None:
        raise Unavailable("rank 0 knows more")
    job.end()
    raise Unavailable(job.exit_report())


def _worker(folder: str) -> list[str]:
    return [sys.executable, "-m", "mpisgd.bench.peers.worker", folder]


def _ended_with_parent(command: Sequence[str], end: signal.Signals) -> list[str]:
    """Return a command that gets the signal `end` when this process ends."""
    return [sys.executable, "-c", END_WITH_PARENT, str(int(end)), *command]


def _without_launcher() -> dict[str, str]:
    """Return the environment without what makes this process a rank."""
    return {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES) or k.startswith(KEPT)}
