"""A learner is stopped for a while, and another is killed: the others wait for the grace, and go on."""

from __future__ import annotations

import json
from pathlib import Path

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
