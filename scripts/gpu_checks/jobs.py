"""Jobs under mpirun that may hang or be ended by a signal: each has a limit, and its end is a finding."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from progress import stop

from gpu_checks.catalog import Check, Setting
from gpu_checks.finding import FAILS, HOLDS, Finding, joined
from mpisgd.tools.bench.jobs import ERROR, job_environment, mpirun

__all__ = ["environment", "launch", "run_check", "tail"]

SCRIPTS = Path(__file__).resolve().parent.parent
RANK: tuple[str, ...] = ("-m", "gpu_checks.rank")  # the program of each rank
NOTE_LINES = 15  # of a log, in the report
# What Open MPI says of any job that fails.
NOISE = ("----", "Primary job", "MPI_ABORT", "with errorcode", "You may or may not", "exactly when Open MPI")
# Of a signal: its backtraces, which push everything else out, and sentences with the name of the host.
BACKTRACE = re.compile(
    r"\[[\w.-]+:\d+\] |(prterun|mpirun|mpiexec) noticed|signal \d+ \(|(Current thread|Thread) 0x"
    r'|Extension modules:|  File "[^"]*", line \d+ in '
)


def environment(size: int, transport: str | None = None) -> dict[str, str]:
    """The environment of a job: this Python's programs first, mpisgd of this clone, nothing of a network."""
    paths = [
        str(SCRIPTS.parent),
        str(SCRIPTS),
        str(SCRIPTS / "testing"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {
        **job_environment(size),
        "OMPI_MCA_mpi_yield_when_idle": "1",  # simulated GPUs need the cores on which ranks wait
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(paths),
        **({} if transport is None else {"MPISGD_GPU": transport}),
    }


def launch(command: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float) -> str:
    """Run a command, with all that it says in a file; what went wrong with it, "" if nothing."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            stop(process)
            return f"no end within {limit_s:.0f} s"
        except BaseException:
            stop(process)
            raise
    return "" if code == 0 else _named(code)


def _named(code: int) -> str:
    """An exit code, with the signal that it stands for."""
    number = -code if code < 0 else code - 128
    try:
        return f"ended by {signal.Signals(number).name}" if number > 0 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def run_check(
    check: Check, setting: Setting, folder: Path, limit_s: float, options: Sequence[str]
) -> tuple[Finding, float]:
    """Run a check in a job of its own; what it found, and the seconds it took."""
    folder.mkdir(parents=True)
    survive = ["--with-ft", "ulfm"] if check.ends_a_rank and "openmpi" in _library() else []
    command = [*mpirun(), *survive, "-n", str(setting.size), sys.executable]
    command += [*RANK, check.name, str(folder), *options]
    begun, log = time.monotonic(), folder / "log.txt"
    problem = launch(command, environment(setting.size, setting.transport), log, limit_s)
    took_s = time.monotonic() - begun
    missing_ok = int(check.ends_a_rank)
    reports = sorted(folder.glob("rank-*.json"))
    findings = [Finding(**json.loads(path.read_text())) for path in reports]
    if len(findings) < max(1, setting.size - missing_ok):
        failed = [each for each in findings if each.verdict == FAILS]
        seen = failed[0].seen if failed else problem or "exit code 0"
        text = f"{seen}; {setting.size - len(findings)} of {setting.size} ranks left no finding"
        return Finding(FAILS, "every process comes to its end", f"{text}{_last_words(log)}"), took_s
    found = joined(findings)
    if problem and found.verdict == HOLDS and not check.ends_a_rank:
        return Finding(FAILS, found.expected, f"{found.seen}; then {problem}{_last_words(log)}"), took_s
    return found, took_s


def _library() -> str:
    """The words of the launcher that tell Open MPI from others."""
    done = subprocess.run([*mpirun(), "--version"], capture_output=True, text=True, check=False)
    return done.stdout.lower().replace(" ", "")


def tail(log: Path) -> list[str]:
    """The last lines of a log that say something."""
    if not log.exists():
        return []
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines()]
    kept = [
        line for line in lines if line and not line.lstrip().startswith(NOISE) and not BACKTRACE.match(line)
    ]
    return kept[-NOTE_LINES:]


def _last_words(log: Path) -> str:
    lines = tail(log)
    said = next(filter(ERROR.match, lines), lines[-1] if lines else "")
    return f": {said.strip()}" if said else ""
