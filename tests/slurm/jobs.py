"""Run a shell script on an emulated Slurm cluster, as `./scripts/slurm` does; a hang is a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import progress

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")
COMMAND = [sys.executable, str(ROOT / "scripts" / "emulation" / "virtual_slurm.py")]
MPICH = Path(sys.prefix + "-mpich") / "bin" / "python"
# sbatch hands its environment to the job. What other tests set there changes how mpirun places ranks.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("PRTE_", "OMPI_MCA_"))},
    "PYTHONPATH": str(ROOT),
    "MPISGD_PROFILE": "built-in",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "BATCH": str(ROOT / "hostfiles"),
    "PROGRAMS": str(PROGRAMS),
    "PYTHON": sys.executable,
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
}
# `submit` prints the number of a job; `await_end` returns once no job with that number waits or runs.
PRELUDE = """
set -eu
submit() { sbatch --parsable --output=%x-%A.out "$@"; }
await_end() { while [ -n "$(squeue -h -j "$1" 2>/dev/null)" ]; do sleep 0.2; done; }
await_file() { until ls $1 >/dev/null 2>&1; do sleep 0.1; done; }
"""


@dataclass(frozen=True)
class Ended:
    """One end of a job, as Slurm's log of completed jobs has it.

    Attributes:
        number: the job's id.
        name: the job's name.
        state: for example COMPLETED.
        code: exit code and signal, for example 85:0.
    """

    number: int
    name: str
    state: str
    code: str


ENDED: list[tuple[str, Ended]] = []
LINE = re.compile(r"JobId=(\d+) .*?Name=(\S*) JobState=(\S+) .* ExitCode=(\S+)")


@lru_cache(maxsize=1)
def obstacle() -> str:
    """Why there can be no Slurm on this machine; empty if there can."""
    done = subprocess.run([*COMMAND, "--check"], capture_output=True, text=True, timeout=180)
    return done.stderr.strip() or "the check failed" if done.returncode else ""


@dataclass(frozen=True)
class Cluster:
    """Where jobs are submitted.

    Attributes:
        folder: with the environment and the scripts of a checkout.
        test: for the table of jobs.
    """

    folder: Path
    test: str

    def __post_init__(self) -> None:
        (self.folder / ".venv").symlink_to(sys.prefix)
        (self.folder / "scripts").symlink_to(ROOT / "scripts")

    def run(
        self, hosts: str, script: str, *settings: str
    ) -> tuple[subprocess.CompletedProcess[str], list[Ended]]:
        """Run a shell script on the login host of a new cluster; what it says, and how its jobs have ended.

        Args:
            hosts: CPUs of each node, such as "2,1".
            script: it begins with PRELUDE.
            settings: more lines for slurm.conf.
        """
        history = self.folder / "history"
        more = [word for line in settings for word in ("--setting", line)]
        command = [*COMMAND, "--hosts", hosts, "--history", str(history), *more]
        done = progress.run(
            [*command, "--", "bash", "-c", PRELUDE + script],
            env=ENVIRONMENT,
            cwd=self.folder,
            written=[self.folder],
        )
        ended = [Ended(int(job[1]), job[2], job[3], job[4]) for job in LINE.finditer(history.read_text())]
        ENDED.extend((self.test, job) for job in ended)
        return done, ended

    def output(self, name: str) -> str:
        """What the jobs of a name have printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{name}*.out")))
