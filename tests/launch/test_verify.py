"""`python -m mpisgd verify` alone, and under mpirun."""

from __future__ import annotations

import json

import pytest
from launcher import run_python


def test_it_starts_its_own_jobs_and_writes_what_it_found(tmp_path):
    path, picture = tmp_path / "cells.json", tmp_path / "cells.png"
    words = ("verify", "--quick", "--only", "TopK(ratio=0.2)", "--ranks", "2", "--cluster", "none")
    words = (*words, "--json", path, "--plot", picture)
    done = run_python("-m", "mpisgd", *map(str, words))
    assert done.returncode == 0, done.stderr
    cells = json.loads(path.read_text())["cells"]
    assert {(cell["ranks"], cell["transport"], cell["dtype"]) for cell in cells} == {
        (2, "shared memory", "float64"),
        (2, "2 hosts, pretended", "float64"),
        (2, "2 hosts, pretended", "float32"),
    }
    assert f"{len(cells)} of {len(cells)} cells are as they must be" in done.stdout
    assert picture.exists()


def test_under_mpirun_it_takes_these_ranks_and_prints_once():
    done = run_python(
        "-m",
        "mpisgd",
        "verify",
        "--quick",
        "--sabotage",
        "--only",
        "LocalSGD(2)",
        num_ranks=2,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.count("8 of 8 cells are as they must be") == 1


@pytest.mark.long
def test_a_rank_is_killed_in_jobs_of_its_own():
    done = run_python("-m", "mpisgd", "verify", "--sabotage", "--only", "elastic.run", "--ranks", "3")
    assert done.returncode == 0, done.stderr
    assert "4 of 4 cells are as they must be" in done.stdout


def test_an_unknown_mode_is_refused_before_anything_starts():
    done = run_python("-m", "mpisgd", "verify", "--only", "no such mode")
    assert done.returncode == 2
    assert "--only: no mode's name contains 'no such mode'" in done.stderr
