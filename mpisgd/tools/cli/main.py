"""`mpisgd COMMAND`, or `python -m mpisgd COMMAND`."""

import contextlib
import sys
from pathlib import Path

import typer

from mpisgd import __version__
from mpisgd.tools.cli.bench.app import bench
from mpisgd.tools.cli.explain import explain
from mpisgd.tools.cli.info import info
from mpisgd.tools.cli.memory import memory
from mpisgd.tools.cli.plan import plan
from mpisgd.tools.cli.program import OF_PROGRAM, is_reporting_rank, run_program
from mpisgd.tools.cli.run import run
from mpisgd.tools.cli.top import top
from mpisgd.tools.cli.trace import trace
from mpisgd.tools.cli.tune import tune
from mpisgd.tools.cli.verify import verify

__all__ = ["main"]

app = typer.Typer(add_completion=False)
app.command()(info)
app.command()(tune)
app.command()(trace)
app.command()(memory)
app.command()(verify)
app.command()(top)
app.command()(plan)
app.command()(explain)
app.command(context_settings=OF_PROGRAM)(run)
app.add_typer(bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mpisgd {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def commands(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Distributed SGD with torch over MPI: commands that go with the library."""
    if context.invoked_subcommand is not None:
        return
    if is_reporting_rank():
        with contextlib.redirect_stdout(sys.stderr):
            print(context.get_help())
    raise typer.Exit(2)


def main() -> None:
    """Run the command line; alone, or on every rank of a job."""
    is_script = Path(sys.argv[0]).name == "mpisgd"
    run_program(app, prog_name="mpisgd" if is_script else "python -m mpisgd")
