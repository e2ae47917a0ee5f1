"""Horovod's elastic training survives lost ranks, and comes to what those that are left should come to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launcher import run_python

PROGRAM = Path(__file__).parent / "programs" / "horovod_elastic.py"


def outcome(done) -> tuple[list[int], float, str]:
    """How many ranks took each step, how far off they are, and what was complained of."""
    assert done.returncode == 0, done.stderr
    said = re.search(r"sizes \[(.*)\] worst (\S+) resets 3", done.stdout)
    assert said, done.stdout + done.stderr
    return [int(size) for size in said[1].split(",")], float(said[2]), done.stderr


@pytest.mark.timeout(720)
def test_ranks_are_lost_before_and_after_backward_and_in_a_commit():
    """The first rank among them; in the end one is left."""
    done = run_python(str(PROGRAM), num_ranks=4, options=("--with-ft", "ulfm"), quiet_s=200.0)
    sizes, worst, told = outcome(done)
    assert sizes == [4] * 2 + [3] * 4 + [2] * 4 + [1] * 2
    assert worst < 1e-12
    assert "mpisgd.horovod: elastic: rank 1 is lost; 3 ranks go on from the last commit" in told
    assert "rank 0 is lost; 2 ranks go on" in told


@pytest.mark.long
@pytest.mark.timeout(720)
def test_lost_ranks_are_replaced():
    """Under our own launcher, which knows how a program ended that had replaced ranks."""
    args = ("-m", "mpisgd", "run", "--elastic", "-n", "4", str(PROGRAM), "--regrow")
    sizes, worst, told = outcome(run_python(*args, quiet_s=200.0))
    assert sizes == [4] * 12
    assert worst < 1e-12
    assert told.count("1 of them new") == 3
