"""A round of each kind of faults, chosen by a seed; `scripts/faults` does more of them."""

from __future__ import annotations

import random

import fault_kinds
import pytest
from fault_kinds import HOSTFILES, KINDS, Round, obstacle

IN_CI = ("kill", "flip-checkpoint", "full-disk")
SEED = 1


def turn(kind: str, folder, in_a_row: int = 3) -> Round:
    return Round(random.Random(f"{SEED} {kind}"), folder, in_a_row)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in IN_CI else pytest.param(kind, marks=pytest.mark.long)
        for kind in KINDS
        if kind != "bad-hostfile"
    ],
)
def test_what_is_promised_of_a_fault_holds(kind, tmp_path):
    if reason := obstacle(kind):
        pytest.skip(reason)
    outcome = KINDS[kind](turn(kind, tmp_path))
    assert outcome.wrong == [], f"{outcome.what}\n{outcome.said}"
    assert outcome.faults == (3 if kind == "kill-in-a-row" else 1)


@pytest.mark.parametrize("name", HOSTFILES)
def test_a_host_file_that_makes_no_sense_is_refused_with_a_message(name, tmp_path, monkeypatch):
    monkeypatch.setattr(fault_kinds, "HOSTFILES", {name: HOSTFILES[name]})
    assert fault_kinds.bad_hostfile(turn(name, tmp_path)).wrong == []
