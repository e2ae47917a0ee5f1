"""A learner is stopped for a while, and another is killed: the others wait for the grace, and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launcher import run_python

PROGRAM = Path(__file__).parent / "programs" / "diloco_quorum.py"
GRACE_S, SLOW_S = 0.5, 1.0  # what a machine with other work may add


@pytest.mark.long
def test_the_others_go_on_without_one_that_is_stopped_or_killed():
    done = run_python(str(PROGRAM), num_ranks=3, options=("--with-ft", "ulfm"), fresh=True)
    seen = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(each["rank"] for each in seen) == [0, 1], done.stderr
    first, other = sorted(seen, key=lambda each: each["rank"])
    assert first["parameters"] == other["parameters"]
    assert [0, 1, 2] in first["outer"]
    assert [0, 2] in first["outer"]  # while 1 was stopped
    assert [0, 1] in first["outer"]  # after the end of 2
    assert max(first["longest_s"], other["longest_s"]) < GRACE_S + SLOW_S


def learners(killed: int, *more: str) -> tuple[dict[int, dict[str, Any]], str]:
    """Return what the ranks have seen of two learners of two, and what was said on standard error."""
    program = str(PROGRAM.with_name("diloco_learners.py"))
    done = run_python(
        program, "2", str(killed), *more, num_ranks=4, options=("--with-ft", "ulfm"), fresh=True
    )
    assert done.returncode == 0, done.stderr
    seen = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {each["rank"]: each for each in seen}, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("killed", [3, 2, 1])
def test_a_rank_that_is_killed_ends_its_learner_alone(killed):
    """Where it is one of the first learner, its first rank serves the others before it ends, too."""
    seen, said = learners(killed)
    left = (0, 1) if killed > 1 else (2, 3)
    other = {1: 0, 2: 3, 3: 2}[killed]
    assert sorted(seen) == list(left), said
    assert seen[left[0]]["parameters"] == seen[left[1]]["parameters"]
    assert max(seen[rank]["longest_s"] for rank in left) < GRACE_S + SLOW_S
    assert f"rank {other} of 4" in said
    assert f"and rank {killed} of the job was lost: the learner ends" in said
    assert "Traceback" not in said
    if killed > 1:
        assert seen[0]["outer"][0] == [0, 1]
        assert seen[0]["outer"][-1] == [0]


@pytest.mark.long
def test_a_program_may_catch_the_loss_of_its_learner():
    seen, said = learners(3, "catches")
    assert sorted(seen) == [0, 1, 2], said
    assert "rank 3 of the job was lost" in seen[2]["error"]
