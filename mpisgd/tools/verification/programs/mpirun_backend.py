"""`MpirunBackend`: programs on ranks that mpirun starts, many programs in one job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType

from mpisgd.tools.bench.jobs import job_environment
from mpisgd.tools.verification.hosts import on_hosts
from mpisgd.tools.verification.programs.compare import Verdict
from mpisgd.tools.verification.programs.program import Program
from mpisgd.tools.verification.programs.try_losses import hosts_of

__all__ = ["MpirunBackend"]

START_LIMIT_S = 120.0
OPERATION_LIMIT_S = 4.0  # after which mpisgd says who waits for whom
PROGRAM_LIMIT_S = 60.0  # after which the job is ended from outside
LAST_LINES = 30


class MpirunBackend:
    """Starts a job for each number of ranks and division into hosts, and again after a fault.

    Args:
        launcher: the words that start a job on this machine.
        cluster: those that start one on emulated hosts; none: ranks of this host count as those of several.
    """

    def __init__(
        self,
        *,
        launcher: Sequence[str] = ("mpirun",),
        cluster: Sequence[str] = (),
    ) -> None:
        self._launcher, self._cluster = launcher, cluster
        self._job: _Job | None = None

    def __enter__(self) -> MpirunBackend:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def run(self, program: Program) -> Verdict:
        """Run a program on its ranks and return what became of it."""
        division = program.ranks, program.ranks_per_host
        if self._job is not None and self._job.division != division:
            self.close()
        if self._job is None:
            self._job = _Job(program, self._launcher, self._cluster)
        verdict = self._job.run(program, PROGRAM_LIMIT_S)
        if not verdict.is_healthy:
            self._job.kill()
            self._job = None
        return verdict

    def close(self) -> None:
        """End the job in order."""
        if self._job is not None:
            self._job.close()
            self._job = None


class _Job:
    """One mpirun.

    Attributes:
        division: (how many ranks, how many of them count as those of one host).
    """

    def __init__(self, program: Program, launcher: Sequence[str], cluster: Sequence[str]) -> None:
        self.division = ranks, ranks_per_host = program.ranks, program.ranks_per_host
        self._folder = tempfile.TemporaryDirectory()
        address = str(Path(self._folder.name) / "socket")
        self._said = Path(self._folder.name) / "said"
        worker = [sys.executable, "-m", "mpisgd.tools.verification.programs.mpirun_worker"]
        words = [*worker, address, str(OPERATION_LIMIT_S)]
        paths = [str(Path(__file__).resolve().parents[4]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **job_environment(ranks),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "MPISGD_PROFILE": "built-in",
            "OMP_NUM_THREADS": "1",
        }
        if cluster and ranks_per_host:
            words = on_hosts(cluster, [len(host) for host in hosts_of(program)], words, environment)
        else:
            environment["MPISGD_RANKS_PER_HOST"] = str(ranks_per_host)
            words = [*launcher, "-n", str(ranks), *words] if ranks > 1 else words
        with Listener(address, "AF_UNIX") as listener, self._said.open("w") as said:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=environment,
                start_new_session=True,
            )
            self._connection = _accept(listener, self._process, self._said)

    def run(self, program: Program, limit_s: float) -> Verdict:
        """Return the outcome of a program."""
        self._connection.send(repr(program))
        try:
            if self._connection.poll(limit_s):
                verdict: Verdict = self._connection.recv()
                return verdict
        except EOFError:
            return Verdict("crash", self._last_lines(), is_healthy=False)
        return Verdict("hang", f"no end within {limit_s:.0f} s\n{self._last_lines()}", is_healthy=False)

    def _last_lines(self) -> str:
        return "\n".join(self._said.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def close(self) -> None:
        """Let the ranks end, and wait for that."""
        self._connection.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        """End the ranks at once."""
        self._connection.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._folder.cleanup()


def _accept(listener: Listener, process: subprocess.Popen[bytes], said: Path) -> Connection:
    """Return the connection to rank 0.

    Raises:
        RuntimeError: the job ends before it is there, or does not come to it.
    """
    listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]  # accept() has no timeout of its own
    for _ in range(int(START_LIMIT_S)):
        try:
            return listener.accept()
        except TimeoutError:
            if process.poll() is not None:
                break
    process.kill()
    raise RuntimeError(f"the job did not start:\n{said.read_text(errors='replace')}")
