"""Start a job with faults, and end it where it hangs, whatever its state."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from progress import Hung, wait

from mpisgd.tools.bench.jobs import mpirun as launcher
from mpisgd.tools.cli.supervision import processes_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GRACE_S = 5.0
ENVIRONMENT = {
    "MPISGD_PROFILE": "built-in",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        code: its exit code; None: it was killed, since it hung.
        seconds: its duration.
        at: the time of its end, by the machine's clock.
        output: stdout and stderr.
        left: its processes that did not end with it and were killed.
    """

    code: int | None
    seconds: float
    at: float
    output: str
    left: tuple[int, ...] = ()


def program(*arguments: str) -> list[str]:
    """The command of one rank."""
    return [sys.executable, str(HERE / "fault_program.py"), *arguments]


def mpirun(num_ranks: int, *options: str) -> list[str]:
    """The launcher, for so many ranks."""
    return [*launcher(), "-n", str(num_ranks), *options]


def on_hosts(hosts: str, options: str) -> list[str]:
    """The prefix of a command that runs it on several emulated hosts."""
    cluster = [sys.executable, str(ROOT / "scripts" / "emulation" / "virtual_cluster.py"), "--hosts", hosts]
    return [*cluster, "--rate", "1gbit", f"--mpirun={options}", "--"]


def run_job(command: Sequence[str], quiet_s: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run a command and whatever it starts; nothing of it is left when this returns.

    It hangs, and is killed, where it has said nothing for `quiet_s`.
    """
    started = time.monotonic()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.NamedTemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        left: tuple[int, ...]
        code, at, left = None, started, ()
        try:
            code = wait(process, [Path(said.name)], quiet_s)
            at = time.monotonic()
            left = _outlive(process.pid)
        except Hung:
            pass
        finally:
            _end_session(process.pid)
        said.seek(0)
        return Ended(code, time.monotonic() - started, at, said.read(), left)


def _outlive(session: int) -> tuple[int, ...]:
    """The processes of a session that do not end by themselves."""
    until = time.monotonic() + GRACE_S
    while (left := tuple(processes_of(session))) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def _end_session(session: int) -> None:
    for pid in processes_of(session):
        for number in (signal.SIGKILL, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
