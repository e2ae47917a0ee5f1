"""Jobs that a benchmark starts itself: `mpirun` as a child, watched while it runs, and its end."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from mpisgd.errors import JobError

__all__ = ["OVERSUBSCRIBE", "Job", "mpirun", "run_job"]

# More ranks than cores are a fair question here. Open MPI 5, then 4; other launchers never refuse.
OVERSUBSCRIBE = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
END_S = 5.0


def mpirun(launcher: str = "") -> list[str]:
    """Return the launcher's words; by default that of this Python's environment, else the first on PATH."""
    if launcher:
        return shlex.split(launcher)
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise JobError("no mpirun beside this Python or on the PATH; name one with --launcher")
    return [found]


class Job:
    """A launcher, or another program, as a child that prints nothing here.

    Args:
        command: its words.
        env: its environment.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=dict(env),
        )

    def is_running(self) -> bool:
        """Return whether it has not ended yet."""
        return self._process.poll() is None

    def exit_code(self, limit_s: float) -> int:
        """Return its exit code once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, within the limit.
        """
        return self._process.wait(limit_s)

    def exit_report(self) -> str:
        """Return how it ended, and the last line it wrote to stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"exit code {self._process.returncode}: {last}"

    def end(self) -> None:
        """End it and what it started; a launcher that is asked takes its ranks along."""
        for insist in (self._process.poll, self._process.terminate, self._kill):
            insist()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
                return

    def _kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for started in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    started.kill()
        self._process.kill()


def run_job(
    launcher: Sequence[str],
    num_ranks: int,
    module: Sequence[str],
    limit_s: float,
    *,
    watch: Callable[[], object] | None = None,
    every_s: float = 0.005,
) -> None:
    """Run a Python module with its arguments on some ranks.

    Args:
        launcher: its words.
        num_ranks: how many.
        module: its name, and arguments.
        limit_s: when to give up.
        watch: called again and again while the job runs.
        every_s: the pause between two such calls.

    Raises:
        JobError: it failed, with the last line it said, or did not end in time; all of it is ended then.
    """
    command = [*launcher, "-n", str(num_ranks), sys.executable, "-m", *module]
    job = Job(command, {**OVERSUBSCRIBE, **os.environ})
    try:
        code = job.exit_code(limit_s) if watch is None else _watch(job, limit_s, watch, every_s)
    except subprocess.TimeoutExpired as exc:
        raise JobError(f"{shlex.join(command)}: no end within {limit_s:.0f} s", 1) from exc
    finally:
        if job.is_running():
            job.end()
    if code != 0:
        raise JobError(f"{module[0]} on {num_ranks} ranks ended with {job.exit_report()}", 1)


def _watch(job: Job, limit_s: float, watch: Callable[[], object], every_s: float) -> int:
    """Return the exit code; until there is one, look again and again."""
    deadline = time.monotonic() + limit_s
    while job.is_running() and time.monotonic() < deadline:
        watch()
        time.sleep(every_s)
    return job.exit_code(0)
