"""`./scripts/soak`: what counts as growth, and what its jobs say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from soaking import main

    return main


def samples(soak, **second_half):
    """Ten samples of a job that holds the same all the time, but for what is added in the second half."""
    names = ("memory", "files", "threads", "mapped", "groups")
    return [
        soak.Sample(count, tuple(100 + second_half.get(name, 0) * max(0, count - 5) for name in names))
        for count in range(1, 11)
    ]


def test_what_grows_in_the_second_half_is_named(soak):
    assert soak.growing(samples(soak)) == []
    assert soak.growing(samples(soak, memory=1000)) == []  # bytes, which the allocator may need
    assert soak.growing(samples(soak, memory=1_000_000, threads=1)) == ["memory, MB", "threads"]
    for name in ("files", "mapped", "groups"):
        assert len(soak.growing(samples(soak, **{name: 1}))) == 1


def test_a_job_says_what_its_ranks_hold(tmp_path):
    record = tmp_path / "soak.json"
    command = [sys.executable, "-m", "soaking.main", "groups", "--ranks", "2", "--share", "0"]
    command += ["--json", str(record)]
    done = subprocess.run(command, cwd=SCRIPTS, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # so few turns may only warm up
    found = json.loads(record.read_text())
    (row,) = found["cells"]
    assert row[:3] == ["groups", "2", "20"]
    assert found["columns"][7].startswith("groups:")
    assert row[7] == "2 / 2", "of the job, and torch's default group; others are left"
