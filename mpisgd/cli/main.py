"""`python -m mpisgd COMMAND`."""

import typer

from mpisgd.cli.bench import bench
from mpisgd.cli.info import info
from mpisgd.cli.program import run_program

__all__ = ["main"]

app = typer.Typer(add_completion=False)
app.command()(info)
app.add_typer(bench, name="bench")


@app.callback()
def commands() -> None:
    """Distributed SGD with torch over MPI: commands that go with the library."""


def main() -> None:
    """Run the command line; alone, or on every rank of a job."""
    run_program(app, prog_name="python -m mpisgd")
