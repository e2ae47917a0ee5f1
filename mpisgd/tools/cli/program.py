"""Run a Typer application as one program spread over the ranks of a job.

Under `mpirun -n 8` a mistyped option would be reported eight times, and `--help` printed eight times.
Here the rank that the launcher numbers 0 reports for all: the command line is read long before MPI
starts. A launcher ends the whole job as soon as one process fails, so the others, who fail at the same
moment, wait first, so that its message is printed.
"""

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer

from mpisgd.config import launcher_rank
from mpisgd.errors import InvalidArgument, JobError

__all__ = ["OF_PROGRAM", "bad_input", "is_reporting_rank", "run_program"]

# Settings of a command that takes a program: what comes after the program belongs to the program.
OF_PROGRAM = {"allow_interspersed_args": False, "ignore_unknown_options": False}

# How long the other ranks wait before they fail too. The first rank may be slower to load its libraries;
# where the launcher ends the job with its first failure, as mpirun does, nobody waits this long.
FIRST_REPORT_S = 10.0

BROKEN_PIPE = 128 + signal.SIGPIPE  # the exit code that a shell gives programs without a handler

# Typer stopped building on click, so the class is reached in the way that both have in common.
UsageError: type[Any] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")


def run_program(app: typer.Typer, *, prog_name: str | None = None) -> None:
    """Run `app` on this rank with the arguments of the command line.

    Returns when the command is done. A usage error, `--help` and the like appear once for the whole job,
    and every rank exits with the code they ask for (2 for a usage error). A `JobError` is left to the hook
    that `mpisgd.init()` installed; without `init()` it is printed here, as one line, and ends the program
    with its exit code; under a launcher that does not end the job then (MPICH's, as long as MPI has not
    started) the ranks that met it too repeat it some seconds later. Anything else passes through.

    Args:
        app: the application; with one command, or several.
        prog_name: what messages call the program; default: the file's name.
    """
    prog_name = prog_name or Path(sys.argv[0]).name
    command = typer.main.get_command(app)
    if not is_reporting_rank():
        _parse_in_silence(command)
    try:
        with command.make_context(prog_name, sys.argv[1:]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wanted, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
        sys.exit(BROKEN_PIPE)
    except typer.Exit as exc:
        if exc.exit_code != 0 and not is_reporting_rank() and not _in_job():
            time.sleep(FIRST_REPORT_S)  # an earlier end could end the job before that rank has printed
        sys.exit(exc.exit_code)
    except typer.Abort:
        _end(prog_name, JobError("aborted", exit_code=1), same_everywhere=True)
    except UsageError as exc:
        _end(prog_name, _as_job_error(exc), same_everywhere=True)
    except JobError as exc:
        _end(prog_name, exc, same_everywhere=False)


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """Turn what is wrong with the arguments or the files of a command into one line, and exit code 2.

    Raises:
        JobError: in place of InvalidArgument and OSError.
    """
    try:
        yield
    except InvalidArgument as exc:
        raise JobError(str(exc), exit_code=2) from exc
    except OSError as exc:
        raise JobError(f"{exc.filename}: {exc.strerror}", exit_code=2) from exc


def is_reporting_rank() -> bool:
    """Return whether this process prints for all: by the launcher's count, long before MPI starts."""
    return launcher_rank() in (None, 0)


def _parse_in_silence(command: Any) -> None:
    """Let `command` and all below it print nothing while they read their arguments.

    That is where `--help`, and `--version` as programs have it, are printed.
    """
    parse_args: Callable[..., list[str]] = command.parse_args

    def parse(*args: Any) -> list[str]:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return parse_args(*args)

    command.parse_args = parse
    for below in getattr(command, "commands", {}).values():
        _parse_in_silence(below)


def _as_job_error(error: Any) -> JobError:
    """Return a usage error as one line; lists of choices come over several."""
    text = " ".join(error.format_message().split())
    if type(error).__name__ == "NoArgsIsHelpError":  # its text is the help page
        text = "missing command or arguments"
    return JobError(f"{text.rstrip('.')}; see --help", exit_code=error.exit_code)


def _end(prog_name: str, error: JobError, *, same_everywhere: bool) -> NoReturn:
    """Report `error` once for the job and exit with its code.

    Args:
        prog_name: what the message begins with.
        error: what ends the program.
        same_everywhere: every rank has met it. Otherwise this rank may be the only one, and then it
            prints too, after a wait for the first.
    """
    if _in_job():
        raise error
    where = "" if is_reporting_rank() else f" on rank {launcher_rank()}"
    if where:
        time.sleep(FIRST_REPORT_S)
    if not where or not same_everywhere:
        typer.echo(f"{prog_name}: error{where}: {error}", err=True)
    sys.exit(error.exit_code)


def _in_job() -> bool:
    # Where nothing has imported it there is no job, and to import it here would load torch for an error.
    job = sys.modules.get("mpisgd.job.lifecycle")
    return job is not None and bool(job.is_initialized())
