"""`./scripts/scale`: what its jobs measure, and how they end. Nothing here looks at speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_the_short_form_measures_every_quantity(tmp_path):
    record = tmp_path / "scale.json"
    command = [sys.executable, "-m", "scaling.main", "--short", "--json", str(record)]
    done = subprocess.run(command, cwd=SCRIPTS, env=os.environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(record.read_text())
    assert found["columns"] == ["what", "4 x 4"]
    rows = {row[0].partition(", ")[0]: row[1] for row in found["cells"]}
    assert {"start", "step", "all_reduce", "barrier", "checkpoint", "recovery"} <= rows.keys()
    assert {"stall report", "end after a kill"} <= rows.keys()
    for values in rows.values():
        assert all(float(value.replace(",", "")) > 0 for value in values.split(" / "))


@pytest.mark.parametrize("what", ["measure", "recover"])
def test_a_job_that_ends_otherwise_is_an_error_with_what_it_said(what, tmp_path, monkeypatch):
    pytest.importorskip("typer")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from scaling import main as scale

    from mpisgd.errors import JobError

    broken = tmp_path / "program.py"
    broken.write_text("print('nothing is measured')\n")
    monkeypatch.setattr(scale, "PROGRAM", broken)
    with pytest.raises(JobError, match=rf"1 x 2, {what}: (.|\n)*nothing is measured"):
        {"measure": scale.measured, "recover": scale.recovered}[what](scale.Shape(1, 2), tmp_path)
