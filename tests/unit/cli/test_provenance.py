"""Where a measurement comes from, as its record tells."""

from __future__ import annotations

import sys

import pytest

from mpisgd.tools.cli.provenance import provenance


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("/usr/lib/python3/mpisgd/__main__.py", "python -m mpisgd verify --quick"),
        ("/usr/bin/mpisgd", "python -m mpisgd verify --quick"),
        ("/home/me/mpisgd/scripts/bench/bench_muon.py", "python scripts/bench/bench_muon.py verify --quick"),
        ("/home/me/train.py", "python train.py verify --quick"),
    ],
)
def test_the_command_can_be_typed_again(program, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "verify", "--quick"])
    assert provenance()["command"] == said
