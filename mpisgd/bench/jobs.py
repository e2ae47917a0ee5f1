"""Jobs that a benchmark starts itself: `mpirun` as a child, watched while it runs, and its end."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mpisgd.errors import JobError

__all__ = ["OVERSUBSCRIBE", "mpirun", "run_job"]

# More ranks than cores are a fair question here. Open MPI 5, then 4; other launchers never refuse.
OVERSUBSCRIBE = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def mpirun(launcher: str = "") -> list[str]:
    """Return the launcher's words; by default that of this Python's environment, else the first on PATH."""
    if launcher:
        return shlex.split(launcher)
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise JobError("no mpirun beside this Python or on the PATH; name one with --launcher")
    return [found]


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
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**OVERSUBSCRIBE, **os.environ},
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s) if watch is None else _watch(process, limit_s, watch, every_s)
        except BaseException as exc:
            _end(process)
            if isinstance(exc, subprocess.TimeoutExpired):
                raise JobError(f"{shlex.join(command)}: no end within {limit_s:.0f} s", 1) from exc
            raise
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if code != 0:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
        raise JobError(f"{module[0]} on {num_ranks} ranks ended with exit code {code}: {last.strip()}", 1)


def _watch(
    process: "subprocess.Popen[bytes]", limit_s: float, watch: Callable[[], object], every_s: float
) -> int:
    """Return the exit code; until there is one, look again and again."""
    deadline = time.monotonic() + limit_s
    while (code := process.poll()) is None:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, limit_s)
        watch()
        time.sleep(every_s)
    return code


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a launcher and what it started; asked first, it takes its ranks along."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
