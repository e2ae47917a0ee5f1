"""Jobs that a benchmark starts itself: `mpirun` as a child, watched while it runs, and its end."""

import contextlib
import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from mpisgd.cores import available_cores
from mpisgd.errors import JobError

__all__ = [
    "OVERSUBSCRIBE",
    "UNBOUND",
    "Job",
    "has_several_cores",
    "job_environment",
    "mpirun",
    "run_command",
    "run_job",
]

# More ranks than cores are a fair question here. Open MPI 5, then 4; other launchers never refuse.
OVERSUBSCRIBE = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
# Else Open MPI gives each of one or two ranks a single core, however many there are.
UNBOUND = {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMPI_MCA_hwloc_base_binding_policy": "none"}
END_S = 5.0
ERROR = re.compile(r"(mpisgd\.[\w.]+|[\w.]+(Error|Exception)): ")  # the last line of a traceback
# Runs a command that gets a signal (PR_SET_PDEATHSIG) when its parent ends, whatever ends that.
END_WITH_PARENT = """
import ctypes, os, sys
_, end, *command = sys.argv
ctypes.CDLL(None).prctl(1, int(end))
os.execvp(command[0], command)
"""


def mpirun(launcher: str = "") -> list[str]:
    """Return the launcher's words; by default that of this Python's environment, else the first on PATH."""
    if launcher:
        return shlex.split(launcher)
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise JobError("no mpirun beside this Python or on the PATH; name one with --launcher")
    return [found]


def job_environment(num_ranks: int) -> dict[str, str]:
    """Return the environment of a launcher of so many ranks on this host; what the user has set wins."""
    return {**OVERSUBSCRIBE, **(UNBOUND if has_several_cores(num_ranks) else {}), **os.environ}


def has_several_cores(num_ranks: int) -> bool:
    """Return whether some of so many ranks on this host could use more than one core."""
    return num_ranks < available_cores()


class Job(subprocess.Popen[bytes]):
    """A launcher, or another program, as a child that prints nothing here, and ends with this process.

    Args:
        command: its words.
        env: its environment.
        all_output: keep what it writes to stdout too, not only to stderr.
        end: the signal that it gets when this process ends; a launcher takes its ranks along on SIGTERM.

    Raises:
        FileNotFoundError: there is no such command.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        all_output: bool = False,
        end: signal.Signals = signal.SIGTERM,
    ) -> None:
        if shutil.which(command[0], path=env.get("PATH")) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        nothing = subprocess.DEVNULL
        out = self._output if all_output else nothing
        tied = [sys.executable, "-IS", "-c", END_WITH_PARENT, str(int(end)), *command]
        super().__init__(tied, stdin=nothing, stdout=out, stderr=self._output, env=env)

    def lines(self) -> list[str]:
        """Return the lines of its output that are not empty."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").replace("\0", "").split("\n")
        return [line.rstrip() for line in lines if line.strip()]

    def exit_report(self) -> str:
        """Return how it ended, and the error that it wrote first, or its last line."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(END_S)
        lines = self.lines() or ["it said nothing"]
        said = next(filter(ERROR.match, lines), lines[-1])
        return f"exit code {self.returncode}: {said.strip()}"

    def end(self) -> None:
        """End it and what it started; a launcher that is asked takes its ranks along."""
        for insist in (self.poll, self.terminate, self._kill_all):
            insist()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(END_S)
                return

    def _kill_all(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for started in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    started.kill()
        self.kill()


def run_job(
    launcher: Sequence[str],
    num_ranks: int,
    module: Sequence[str],
    limit_s: float,
    *,
    watch: Callable[[], object] = lambda: None,
    every_s: float = 0.05,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Run a Python module with its arguments on some ranks.

    Args:
        launcher: its words.
        num_ranks: how many.
        module: its name, and arguments.
        limit_s: when to give up.
        watch: called again and again while the job runs.
        every_s: the pause between two such calls.
        settings: further variables of the job's environment.

    Raises:
        JobError: it failed, with the last line it said, or did not end in time; all of it is ended then.
    """
    command = [*launcher, "-n", str(num_ranks), sys.executable, "-m", *module]
    env = {**job_environment(num_ranks), **(settings or {})}
    run_command(command, env, f"{module[0]} on {num_ranks} ranks", limit_s, watch=watch, every_s=every_s)


def run_command(
    command: Sequence[str],
    env: Mapping[str, str],
    name: str,
    limit_s: float,
    *,
    watch: Callable[[], object] = lambda: None,
    every_s: float = 0.05,
) -> None:
    """Run a command that starts a job; `name` is what errors call it. The rest is as for `run_job`."""
    job = Job(command, env)
    deadline = time.monotonic() + limit_s
    try:
        while job.poll() is None:
            if time.monotonic() > deadline:
                raise JobError(f"{shlex.join(command)}: no end within {limit_s:.0f} s", 1)
            watch()
            time.sleep(every_s)
    finally:
        job.end()
    if job.returncode != 0:
        raise JobError(f"{name} ended with {job.exit_report()}", 1)
