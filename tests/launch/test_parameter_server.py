"""A worker is killed in the middle of a push, another stopped at random: no update is lost or doubled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher import run_python

PROGRAM = Path(__file__).parent / "programs" / "parameter_server.py"


@pytest.mark.parametrize("mode", ["async", pytest.param("ssp", marks=pytest.mark.long)])
def test_the_others_go_on_and_every_update_counts_once(mode):
    options = ("--with-ft", "ulfm")
    done = run_python(str(PROGRAM), mode, num_ranks=3, options=options, fresh=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    counted = json.loads(lines[0])
    assert counted["finite"]
    assert counted["finished"] == [60, 60, 20]
    assert counted["pushed"] == [60, 60, 20]
    assert counted["begun"] == [60, 60, 21]  # the last one was under way
    for applied in counted["applied"]:
        assert applied[:2] == [60, 60]
        assert applied[2] in (20, 21)
    assert 20 in [applied[2] for applied in counted["applied"]]  # the half-made update does not count
    assert max(counted["clock"][:2]) == 60
    if mode == "ssp":
        assert max(counted["lead"]) <= 3
