"""`Peer`: the process of another framework beside this rank, and the two ways of starting it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from typing import Any

import psutil
import torch

import mpisgd
from mpisgd.cores import cores_of_job
from mpisgd.tools.bench.jobs import OVERSUBSCRIBE, UNBOUND, Job, mpirun
from mpisgd.tools.bench.measure import Unavailable
from mpisgd.tools.bench.peers.framework import Rendezvous

__all__ = ["Peer", "start_beside", "start_in_job", "start_once"]

START_LIMIT_S = 120.0
ANSWER_LIMIT_S = 90.0
# Nobody listens yet, or it has ended in the meantime.
NOT_THERE = (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, EOFError, psutil.NoSuchProcess)
# They keep a thread busy even between requests.
BUSY = ("horovod",)
LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL")
KEPT = ("OMPI_ALLOW_RUN_AS_ROOT",)
# Each of the second job's ranks takes the cores of the rank that it belongs to.
SECOND_JOB = {**OVERSUBSCRIBE, **UNBOUND}


class Peer:
    """The process beside this rank that runs one framework.

    Args:
        framework: one of FRAMEWORKS.
        connection: to it; it has told its process id there.
        job: what this rank has started: the process, the launcher of all of them, or nothing.

    Attributes:
        version: of the framework, once it is loaded.
        broken: why it is gone, "" while it is there.
        cores: it may use; those of this rank unless set otherwise before it is loaded.
    """

    def __init__(self, framework: str, connection: Connection, job: Job | None) -> None:
        self.version = self.broken = ""
        self.cores = os.sched_getaffinity(0)
        self._framework = framework
        self._connection, self._job = connection, job
        self._process = psutil.Process(connection.recv())

    def load(self, rendezvous: Rendezvous) -> None:
        """Let it import its framework and meet the others. Collective.

        Raises:
            Unavailable: as `ask`.
        """
        here = self.cores, torch.get_num_threads()
        self.version = self.ask("load", self._framework, *here, rendezvous, limit_s=START_LIMIT_S)

    def ask(self, method: str, *args: Any, limit_s: float = ANSWER_LIMIT_S) -> Any:
        """Request something and return the answer. Collective.

        A busy one runs until those of all ranks are done; then it is stopped.

        Raises:
            Unavailable: it cannot, has ended or did not answer in time; after the last two it is gone.
            WrongResult: see `Variant.check`.
        """
        self._signal(signal.SIGCONT)
        try:
            answer = self._answer((method, args), limit_s)
        finally:
            if self._framework in BUSY:
                mpisgd.barrier()
                self._signal(signal.SIGSTOP)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _answer(self, request: tuple[str, Any], limit_s: float) -> Any:
        if not self.broken:
            try:
                self._connection.send(request)
                if self._connection.poll(limit_s):
                    return self._connection.recv()
                self.broken = f"no answer within {limit_s:.0f} s"
            except (EOFError, OSError):
                why = self._job.exit_report() if self._job else "rank 0 knows more"
                self.broken = f"its process ended: {why}"
            self.close()
        raise Unavailable(self.broken)

    def _signal(self, number: signal.Signals) -> None:
        if self._framework in BUSY:
            with contextlib.suppress(psutil.Error):
                self._process.send_signal(number)

    def close(self) -> None:
        """Disconnect, and make sure that it ends."""
        self._connection.close()
        self._signal(signal.SIGCONT)
        if self._job is not None:
            self._job.end()


class OnFirstRank(Peer):
    """The process that rank 0 alone has, as seen from the other ranks: it answers at once."""

    def __init__(self) -> None:
        self.version = self.broken = ""

    def load(self, rendezvous: Rendezvous) -> None:
        """See `Peer`."""

    def ask(self, method: str, *args: Any, limit_s: float = ANSWER_LIMIT_S) -> Any:
        """See `Peer`; what it does takes no time here."""
        return 0.0

    def close(self) -> None:
        """See `Peer`."""


def start_beside(framework: str, folder: str) -> Peer:
    """Start a process of this rank's own; its socket lies in `folder` until it is connected.

    Raises:
        Unavailable: it did not come up.
    """
    return _connect(framework, f"{folder}/0", _start(_worker(folder), signal.SIGKILL))


def start_once(framework: str, folder: str) -> Peer:
    """Start one process for the whole job, on the host of rank 0, with all cores that the job has there.

    Raises:
        Unavailable: it did not come up.
    """
    if mpisgd.rank() != 0:
        return OnFirstRank()
    peer = start_beside(framework, folder)
    peer.cores = cores_of_job()
    return peer


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
            peer = _connect(framework, f"{folder}/0", _start(command, signal.SIGTERM))
        except (Unavailable, mpisgd.JobError) as exc:
            reason = f"its job did not come up: {exc}"
    if reason := mpisgd.broadcast_object(reason):
        raise Unavailable(reason)
    return peer or _connect(framework, f"{folder}/{rank}", None)


def _worker(folder: str) -> list[str]:
    return [sys.executable, "-m", "mpisgd.tools.bench.peers.worker", folder]


def _start(command: Sequence[str], end: signal.Signals) -> Job:
    """Start a command that is no rank of this job, and gets the signal `end` when this process ends."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES) or k.startswith(KEPT)}
    return Job(command, {**SECOND_JOB, **env}, end=end)


def _connect(framework: str, address: str, job: Job | None) -> Peer:
    """Return the process that listens there, once it does; end its job if it does not."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and (job is None or job.poll() is None):
        with contextlib.suppress(*NOT_THERE):
            return Peer(framework, Client(address), job)
        time.sleep(0.02)
    if job is None:
        raise Unavailable("rank 0 knows more")
    job.end()
    raise Unavailable(job.exit_report())
