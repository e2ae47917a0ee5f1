"""`python -m mpisgd run`: start a program under mpirun, and again from its last checkpoint when it fails.

python -m mpisgd run -n 4 train.py --lr 0.1
python -m mpisgd run -n 16 --hostfile hosts --restarts 3 train.py --resume
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import typer

from mpisgd.config import (
    ENDED_NOTE,
    JOINED_NOTE,
    LAST_PORT,
    LEFT_NOTE,
    LOOPBACK,
    NOTES_VARIABLE,
    PREEMPTED,
    PREEMPTED_NOTE,
    is_launched,
)
from mpisgd.cores import available_cores
from mpisgd.errors import JobError
from mpisgd.tools.bench.jobs import mpirun
from mpisgd.tools.cli.supervision import Supervisor

__all__ = ["is_open_mpi", "program_words", "run"]

USAGE_ERROR = 2
SIGNALLED = 128  # codes above tell of a signal
MAX_PAUSE_S = 60.0
# mpirun learns of slots from these.
ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE")
# mpirun ends a job when it notices that it has lost a host's daemon: it must not look.
WITH_FAULT_TOLERANCE = ("--with-ft", "ulfm", "--prtemca", "oob_tcp_keepalive_time", "0")
# Open MPI starts nothing as root without both, or the option.
ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
ROOT_OPTION = "--allow-run-as-root"
# Under Slurm mpirun starts these daemons by srun, which would end them all when a node fails.
WITHOUT_KILL = {"SLURM_NO_KILL": "set"}


class Attempt(NamedTuple):
    """How one start of the program ended, and what is known of its checkpoints then."""

    code: int
    seconds: float
    newest: str

    def report(self, then: str) -> None:
        """Print it, and what comes then."""
        ended = f"exit code {self.code} after {self.seconds:.1f} s"
        typer.echo(f"mpisgd run: {ended}{then}, {self.newest}", err=True)


def run(
    command: list[str] = typer.Argument(..., metavar="PROGRAM [ARGS]...", help="A .py file, or any command."),
    num_ranks: int | None = typer.Option(
        None, "-n", "--ranks", min=1, help="Number of ranks; default: that of mpirun, all slots."
    ),
    hostfile: Path | None = typer.Option(None, help="File with hosts and slots; see hostfiles/."),
    restarts: int = typer.Option(0, min=0, help="Number of restarts after failures."),
    pause_s: float = typer.Option(
        1.0,
        "--pause",
        min=0.0,
        help=f"Seconds before the first restart; doubled each time, up to {MAX_PAUSE_S:.0f}.",
    ),
    metrics_port: int | None = typer.Option(
        None,
        min=0,
        max=LAST_PORT,
        help="Serve metrics for Prometheus at this port of each host; see mpisgd.metrics.",
    ),
    metrics_address: str = typer.Option(
        LOOPBACK, help='Address of that port; "0.0.0.0": all of the host, for everybody who can reach it.'
    ),
    module: bool = typer.Option(False, "--module", "-m", help="PROGRAM is a Python module."),
    elastic: bool = typer.Option(
        False, "--elastic", help="Let mpisgd.elastic survive lost ranks and hosts (Open MPI 5)."
    ),
    launcher: str = typer.Option(
        "", help='For example "mpirun --with-ft ulfm"; default: mpirun beside this Python.'
    ),
) -> None:
    """Start PROGRAM under mpirun; with --restarts again when it fails. Ends with the program's exit code.

    The program finds MPISGD_RESTART_COUNT in its environment. It is not started again after a usage error
    (exit code 2), after a signal that asks for its end, or when it has saved its state and left because of
    one (exit code 85).
    """
    if is_launched():
        raise JobError("run starts mpirun itself: leave out the mpirun before it")
    metrics = _metrics_variables(metrics_port, metrics_address)
    program = program_words(command, module)
    if metrics and program[0] == sys.executable and find_spec("prometheus_client") is None:
        raise JobError('--metrics-port needs prometheus_client: pip install "mpisgd[metrics]"')
    words = [*_launcher(mpirun(launcher), num_ranks, hostfile, elastic, metrics), *program]
    with tempfile.NamedTemporaryFile("r", prefix="mpisgd-run-") as notes:
        env = {**os.environ, **(WITHOUT_KILL if elastic else {}), **metrics, NOTES_VARIABLE: notes.name}
        code = _run_all(words, env, restarts, pause_s)
    raise typer.Exit(code)


def _run_all(words: Sequence[str], env: Mapping[str, str], restarts: int, pause_s: float) -> int:
    supervisor = Supervisor()
    for count in range(restarts + 1):
        attempt = _attempt(supervisor, words, {**env, "MPISGD_RESTART_COUNT": str(count)})
        if not attempt.code:
            return 0
        again = count < restarts and attempt.code not in (USAGE_ERROR, PREEMPTED)
        if supervisor.stopped_by is not None or not again:
            break
        pause = min(pause_s * 2**count, MAX_PAUSE_S)
        attempt.report(f"; restart {count + 1} of {restarts} in {pause:g} s")
        supervisor.pause(pause)
    if supervisor.stopped_by is not None:
        attempt.report(f" after {supervisor.stopped_by.name}")
    elif restarts:
        attempt.report("; not started again")
    return attempt.code


def _attempt(supervisor: Supervisor, words: Sequence[str], env: Mapping[str, str]) -> Attempt:
    start = time.monotonic()
    try:
        code = supervisor.run(words, env)
    except OSError as exc:
        raise JobError(f"cannot start {words[0]}: {exc.strerror or exc}", 127) from exc
    lines = Path(env[NOTES_VARIABLE]).read_text().splitlines()
    code = _code_of_program(code, lines)
    written = [line.partition(" ")[2] for line in lines if line.startswith("checkpoint ")]
    newest = f"newest checkpoint: {written[-1]}" if written else "no checkpoint that is known here"
    return Attempt(code, time.monotonic() - start, newest)


def _code_of_program(code: int, lines: Sequence[str]) -> int:
    """Return the program's exit code, where mpirun's is another one.

    Args:
        code: mpirun's.
        lines: what the program has noted, in all attempts.
    """
    if ENDED_NOTE in lines and code > SIGNALLED:  # that was mpirun's end, or of ranks that were survived
        return 0
    if code or JOINED_NOTE not in lines:
        return code
    # Open MPI returns 0 when a signal has ended its daemons, whatever has become of the program.
    since = lines[len(lines) - lines[::-1].index(JOINED_NOTE) :]
    if PREEMPTED_NOTE in since:
        return PREEMPTED
    if LEFT_NOTE not in since:
        typer.echo("mpisgd run: mpirun has ended with exit code 0 in the middle of the program", err=True)
        return 1
    return 0


# --- the command line ---------------------------------------------------------------------------------


def program_words(command: Sequence[str], module: bool = False) -> list[str]:
    """Return the words that start a program: a Python file, a module, or any command."""
    if module:
        return [sys.executable, "-m", *command]
    if not command[0].endswith(".py"):
        return list(command)
    if not Path(command[0]).is_file():
        raise JobError(f"no such file: {command[0]}")
    return [sys.executable, *command]


def _metrics_variables(port: int | None, address: str) -> dict[str, str]:
    """Return the environment variables by which a program serves metrics."""
    if port is None:
        return {}
    return {"MPISGD_METRICS_PORT": str(port), "MPISGD_METRICS_ADDRESS": address}


def _launcher(
    words: Sequence[str],
    num_ranks: int | None,
    hostfile: Path | None,
    elastic: bool,
    variables: Iterable[str] = (),
) -> list[str]:
    """Return the launcher with what it should be told; `variables`: for ranks of other hosts, too."""
    options = [] if num_ranks is None else ["-n", str(num_ranks)]
    if hostfile is not None:
        if not hostfile.is_file():
            raise JobError(f"no such host file: {hostfile}")
        options += ["-hostfile", str(hostfile)]
    open_mpi = is_open_mpi(words[0])
    if elastic and not open_mpi:
        raise JobError(
            f"--elastic needs Open MPI 5, whose jobs outlive lost ranks; {words[0]} is another MPI"
        )
    if elastic:
        options += WITH_FAULT_TOLERANCE
    if (
        open_mpi
        and os.geteuid() == 0
        and not set(ROOT_VARIABLES) <= os.environ.keys()
        and ROOT_OPTION not in words
    ):
        wanted = " ".join(f"{name}=1" for name in ROOT_VARIABLES)
        raise JobError(f"Open MPI does not start as root unless it is told to: export {wanted}")
    if open_mpi:
        for name in ("MPISGD_RESTART_COUNT", *variables):
            options += ["-x", name]  # to other hosts, too
        # Nobody but us decides on slots here.
        alone = hostfile is None and not any(name in os.environ for name in ALLOCATIONS)
        if alone and num_ranks is not None and num_ranks > available_cores():
            options += ["--oversubscribe", "--bind-to", "none"]
    return [*words, *options]


def is_open_mpi(program: str) -> bool:
    """Return whether a launcher is Open MPI's; raise JobError where there is no such program."""
    if shutil.which(program) is None:
        raise JobError(f"no such launcher: {program}", 127)
    said = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return "Open MPI" in said.stdout
