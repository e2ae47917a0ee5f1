"""One program on several ranks: what its user reads, once, and how it exits."""

import textwrap

import pytest
from launcher import run_python

PROGRAM = """
    import typer

    import mpisgd
    from mpisgd.tools.cli.program import run_program

    app = typer.Typer(add_completion=False)

    @app.command()
    def main(rate: float = 0.1, early: bool = False, late: bool = False, only: int = -1) -> None:
        '''Paint the wall.'''
        if early:
            raise mpisgd.JobError("no such wall", exit_code=5)
        mpisgd.init()
        if late or only == mpisgd.rank():
            raise mpisgd.JobError("no such paint", exit_code=6)
        mpisgd.barrier()
        if mpisgd.rank() == 0:
            print("painted at", rate)

    run_program(app)
"""


@pytest.fixture
def paint(tmp_path):
    program = tmp_path / "paint.py"
    program.write_text(textwrap.dedent(PROGRAM))
    return lambda *args, num_ranks=None: run_python(str(program), *args, num_ranks=num_ranks)


def ours(text: str) -> list[str]:
    """What the program said; the launcher has its own to say about a program that failed."""
    return [line for line in text.splitlines() if "paint.py:" in line or "Traceback" in line]


sizes = pytest.mark.parametrize("num_ranks", [None, 2])


@sizes
def test_a_program_runs(paint, num_ranks):
    done = paint("--rate", "2", num_ranks=num_ranks)
    assert (done.returncode, done.stdout, done.stderr) == (0, "painted at 2.0\n", "")


@sizes
def test_help_appears_once(paint, num_ranks):
    done = paint("--help", num_ranks=num_ranks)
    assert (done.returncode, done.stdout.count("Paint the wall.")) == (0, 1)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--rate", "fast"], 2, "Invalid value for '--rate': "),
        (["--early"], 5, "no such wall"),
        (["--late"], 6, "no such paint"),
    ],
)
def test_what_every_rank_meets_is_said_once(paint, args, code, said):
    done = paint(*args, num_ranks=2)
    (line,) = ours(done.stderr)
    assert line.startswith(f"paint.py: error: {said}")
    assert done.returncode == code


@pytest.mark.parametrize("rank", [0, 2])
def test_what_one_rank_meets_ends_the_job_and_is_said_once(paint, rank):
    done = paint("--only", str(rank), num_ranks=3)
    assert ours(done.stderr) == ["paint.py: error: no such paint"]
    assert done.returncode == 6
