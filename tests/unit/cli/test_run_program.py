"""What one rank prints and how it exits, for the first rank of a job and for another one."""

import enum
import re

import pytest
import typer

from mpisgd.errors import JobError
from mpisgd.tools.cli import program
from mpisgd.tools.cli.program import run_program


class Colour(str, enum.Enum):
    RED = "red"
    BLUE = "blue"


def one_command() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def train(
        colour: Colour = typer.Option(Colour.RED, help="The paint."),
        rate: float = typer.Option(0.1, min=0),
        fail: str = typer.Option("", help="How to end."),
    ) -> int:
        print("running", colour.value, rate)
        if fail == "job":
            raise JobError("no such paint", exit_code=5)
        if fail == "exit":
            raise typer.Exit(4)
        if fail == "abort":
            raise typer.Abort()
        if fail == "usage":
            raise typer.BadParameter("found late")
        if fail == "bug":
            raise KeyError("ours")
        return 7

    return app


def two_commands() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def first(number: int) -> None:
        print("first", number)

    @app.command()
    def second() -> None:
        print("second")

    return app


@pytest.fixture
def run(monkeypatch, capsys, pauses):
    """Run a program as `rank` of a job; return its exit code (None: it returned), stdout and stderr."""
    for name in ("PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)

    def run(app, *args, rank=None, in_job=False):
        monkeypatch.setattr("sys.argv", ["/some/where/train.py", *args])
        monkeypatch.setattr(program, "_in_job", lambda: in_job)
        if rank is None:
            monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
        else:
            monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        pauses.clear()
        code = None
        try:
            run_program(app)
        except SystemExit as exc:
            code = exc.code
        return code, *capsys.readouterr()

    run.slept = pauses
    return run


ranks = pytest.mark.parametrize("rank", [None, 0, 1, 7])


@ranks
def test_the_program_runs_on_every_rank_and_returns(run, rank):
    assert run(one_command(), "--colour", "blue", rank=rank) == (None, "running blue 0.1\n", "")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--colour", "green"], r"Invalid value for '--colour': .*green.*red.*blue.*"),
        (["--rate", "-1"], r"Invalid value for '--rate': .*0.*"),
        (["--rate", "x"], r"Invalid value for '--rate': .*"),
        (["--no-such"], r"No such option: --no-such.*"),
        (["surplus"], r".*surplus.*"),
        (["--fail", "usage"], r"Invalid value: found late"),
    ],
)
@ranks
def test_a_usage_error_is_one_line_of_the_first_rank(run, rank, args, said):
    code, _, err = run(one_command(), *args, rank=rank)
    assert code == 2
    if rank in (None, 0):
        assert re.fullmatch(rf"train\.py: error: {said}; see --help\n", err)
    else:
        assert err == ""
    assert bool(run.slept) == (rank not in (None, 0))


def test_a_missing_argument_is_one_line_too(run):
    code, out, err = run(two_commands(), "first")
    assert (code, out) == (2, "")
    assert err.lower() == "train.py: error: missing argument 'number'; see --help\n"


@pytest.mark.parametrize(
    ("app", "args", "shown"),
    [
        (one_command, ["--help"], "The paint."),
        (two_commands, ["--help"], "second"),
        (two_commands, ["first", "--help"], "number"),
    ],
)
@ranks
def test_help_is_printed_by_the_first_rank_alone(run, rank, app, args, shown):
    code, out, err = run(app(), *args, rank=rank)
    assert (code, err, run.slept) == (0, "", [])
    assert (shown.lower() in out.lower()) == (rank in (None, 0))
    assert (out == "") == (rank not in (None, 0))


@ranks
def test_no_arguments_where_some_are_needed_show_the_help_once(run, rank):
    app = two_commands()
    app.info.no_args_is_help = True
    code, out, err = run(app, rank=rank)
    assert code in (0, 2)  # 0 with click before 8.2
    assert err.count("\n") == (code == 2 and rank in (None, 0))
    assert ("second" in out) == (rank in (None, 0))


def test_a_job_error_without_a_job_is_one_line_and_its_exit_code(run):
    code, _, err = run(one_command(), "--fail", "job")
    assert (code, err) == (5, "train.py: error: no such paint\n")


def test_a_job_error_of_another_rank_is_heard_after_the_first_had_its_time(run):
    code, _, err = run(one_command(), "--fail", "job", rank=3)
    assert (code, err) == (5, "train.py: error on rank 3: no such paint\n")
    assert run.slept


@pytest.mark.parametrize("rank", [0, 3])
def test_a_job_error_within_a_job_is_left_to_the_jobs_hook(run, rank):
    with pytest.raises(JobError, match="no such paint") as caught:
        run(one_command(), "--fail", "job", rank=rank, in_job=True)
    assert caught.value.exit_code == 5
    assert not run.slept


@pytest.mark.parametrize("rank", [0, 3])
def test_a_usage_error_found_within_a_job_becomes_a_job_error(run, rank):
    with pytest.raises(JobError, match="found late; see --help") as caught:
        run(one_command(), "--fail", "usage", rank=rank, in_job=True)
    assert caught.value.exit_code == 2


@ranks
def test_the_exit_code_a_command_asks_for_is_every_ranks(run, rank):
    assert run(one_command(), "--fail", "exit", rank=rank)[0] == 4
    assert bool(run.slept) == (rank not in (None, 0))


def test_aborting_exits_with_1(run):
    code, _, err = run(one_command(), "--fail", "abort")
    assert (code, err) == (1, "train.py: error: aborted\n")


def test_a_bug_passes_through(run):
    with pytest.raises(KeyError, match="ours"):
        run(one_command(), "--fail", "bug")
