"""`python -m mpisgd verify` starts a job on emulated hosts by itself."""

from __future__ import annotations

import json

import progress
from clusters import ENVIRONMENT, ROOT
from launcher import python


def test_it_starts_a_job_on_two_hosts(tmp_path):
    path = tmp_path / "cells.json"
    words = ["verify", "--quick", "--only", "PerHost(TopK", "--ranks", "3", "--json", str(path)]
    done = progress.run([python(), "-m", "mpisgd", *words], env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "pretended" not in done.stderr
    cells = json.loads(path.read_text())["cells"]
    assert [(cell["ranks"], cell["transport"]) for cell in cells] == [(3, "2 hosts")] * 2
