"""Every mistake of the table ends in the right error, on all ranks, within 10 s."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher import run_python
from mistake_reports import check_reports

PROGRAM = Path(__file__).parent / "programs" / "mistakes.py"
LONG = pytest.mark.long
SIZES = [pytest.param(2, marks=LONG), 3, pytest.param(4, marks=LONG)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SIZES)
def test_every_mistake_ends_in_the_right_error_on_all_ranks(size):
    check_reports(run_python(str(PROGRAM), "fast", num_ranks=size), size)


@LONG
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_at_the_pace_of_a_job(size):
    check_reports(run_python(str(PROGRAM), num_ranks=size), size)


# How the last rank leaves, what the others do, and words that the error must hold.
WAYS = [
    ("exits", "recv", ("recv from rank", "shutdown", "rank 0")),
    *(
        pytest.param(*way, marks=LONG)
        for way in [
            ("returns", "all_reduce", ("all_reduce(", "shutdown")),
            ("returns", "all_reduce of a group", ("all_reduce(", "shutdown")),
            ("returns", "async", ("all_reduce(", "shutdown")),
            ("returns", "training", ("DistributedOptimizer(", "shutdown", "2.bias")),
            ("returns", "isend", ("send to rank", "nobody has received it")),
            ("exits", "all_reduce", ("all_reduce(", "shutdown")),
            ("shuts down", "recv", ("recv from rank", "shutdown", "rank 0")),
            ("shuts down", "all_reduce of a group", ("all_reduce(", "shutdown")),
        ]
    ),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("how", "what", "words"), WAYS)
def test_a_rank_that_leaves_early_ends_the_job_with_one_error(how, what, words, size):
    done = run_python(str(PROGRAM), how, what, num_ranks=size)
    assert "CollectiveTimeout" not in done.stderr, done.stderr
    assert done.returncode not in (0, 124), done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert not [word for word in words if word not in done.stderr], done.stderr


@LONG
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_that_raises_ends_the_job_with_its_own_error(size):
    done = run_python(str(PROGRAM), "raises", "recv", num_ranks=size)
    assert done.returncode not in (0, 124), done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "the last rank has had enough" in done.stderr
