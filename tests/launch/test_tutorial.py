"""The programs of scripts/tutorial: each runs as its docstring says, and those that train learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launcher import run_python

PROGRAMS = Path(__file__).resolve().parents[2] / "scripts" / "tutorial"
# Those that do the same on the same batches, whatever is divided among the ranks.
SAME = (
    "average_by_hand",
    "data_parallel",
    "ddp",
    "horovod_style",
    "pipeline",
    "tensor_parallel",
    "zero 1",
    "zero 3",
)
OTHERS = ("mixed_precision", "parameter_server")
SHORT = ("ddp", "parameter_server", "collectives")  # the others run with --long only
AFTER_3_EPOCHS = 0.8
RUNNABLE = sorted([*PROGRAMS.glob("*.py"), *(PROGRAMS.parent / "rpc").glob("*.py")])
assert len(RUNNABLE) > 14
RUNNABLE.remove(PROGRAMS / "digits.py")  # what the others import


def run(name: str, num_ranks: int = 2, options: tuple[str, ...] = ()) -> list[str]:
    program, *args = name.split()
    strict = ("-W", "error", "-W", "ignore::DeprecationWarning")  # torch has some of its own
    command = (*strict, str(PROGRAMS / f"{program}.py"), *args)
    done = run_python(*command, num_ranks=num_ranks, options=options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def marked(*names: str) -> list:
    return [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in names]


def losses(lines: list[str]) -> list[float]:
    return [float(re.fullmatch(r"epoch \d+: loss ([\d.]+)( on \d ranks)?", line)[1]) for line in lines]


@pytest.fixture(autouse=True)
def _data():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


@pytest.mark.parametrize("name", marked(*SAME, *OTHERS))
def test_training_programs_learn(name):
    found = losses(run(name))
    assert len(found) == 3
    assert found[-1] < AFTER_3_EPOCHS < found[0]


@pytest.mark.long
def test_one_batch_makes_one_step_however_it_is_divided():
    """What a batch's mean is taken of differs in the last digits alone."""
    found = {name: losses(run(name)) for name in SAME}
    for name, theirs in found.items():
        assert theirs == pytest.approx(found["ddp"], abs=0.002), name


@pytest.mark.parametrize("name", marked("collectives"))
def test_collectives_give_what_the_table_says(name):
    assert run(name) == [
        "broadcast: [1.0, 1.0]",
        "all_reduce: [1.0, 1.0]",
        "reduce: [1.0, 1.0]",
        "scatter: [0.0]",
        "gather: [[0.0, 0.0], [1.0, 1.0]]",
        "all_gather: [[0.0, 0.0], [1.0, 1.0]]",
        "reduce_scatter: [1.0]",
        "all_to_all: [0.0, 1.0]",
    ]


@pytest.mark.parametrize("name", marked("point_to_point"))
def test_messages_arrive(name):
    assert run(name, 3) == ["passed around: [2.0, 2.0, 2.0], from the last rank: [2.0, 2.0, 2.0]"]


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.stem)
def test_a_program_runs_on_any_ranks_or_says_in_a_line_what_it_wants(path, num_ranks):
    name, done = path.stem, run_python(str(path), num_ranks=num_ranks)
    if done.returncode == 0:
        assert done.stdout.strip()
    else:
        told = [line for line in done.stderr.splitlines() if line.startswith(f"{name}.py: error: ")]
        assert len(told) == 1, done.stderr  # what MPI prints may come before it
        assert "start this" in told[0]
        assert "Traceback" not in done.stderr


@pytest.mark.long
def test_the_elastic_program_goes_on_with_two_ranks():
    done = run_python(str(PROGRAMS / "elastic.py"), num_ranks=3, options=("--with-ft", "ulfm"))
    lines = done.stdout.splitlines()
    assert [line.rpartition(" on ")[2] for line in lines] == ["3 ranks", "2 ranks", "2 ranks"], done.stderr
    assert losses(lines)[-1] < AFTER_3_EPOCHS


def test_every_program_of_the_folder_is_run_here():
    known = {name.split()[0] for name in (*SAME, *OTHERS)} | {"collectives", "point_to_point", "elastic"}
    assert {path.stem for path in PROGRAMS.glob("*.py")} == known | {"digits"}
