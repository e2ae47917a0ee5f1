"""Waiting for a process: how long it takes does not matter, how long it says nothing does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import progress
import pytest


class Clocked:
    """A process and the clock: each look takes a second, and `grow(seconds)` says whether it writes then."""

    def __init__(self, ends_after: int, log: Path, grow) -> None:
        self.now, self.stopped = 0, False
        self._ends_after, self._log, self._grow = ends_after, log, grow

    def wait(self, timeout: float) -> int:
        self.now += 1
        if self.stopped or self.now > self._ends_after:
            return 7
        if self._grow(self.now):
            self._log.write_text(self._log.read_text() + ".")
        raise subprocess.TimeoutExpired("it", timeout)

    def terminate(self) -> None:
        self.stopped = True


@pytest.fixture
def clocked(tmp_path, monkeypatch):
    def make(ends_after, grow):
        log = tmp_path / "logs" / "rank-0.log"
        log.parent.mkdir()
        log.write_text("")
        process = Clocked(ends_after, log, grow)
        monkeypatch.setattr(progress.time, "monotonic", lambda: process.now)
        return process

    return make


def test_what_makes_progress_is_waited_for(clocked, tmp_path):
    """Ten times the limit in all; a folder's files count, also those that are made meanwhile."""
    process = clocked(1000, lambda second: second % 90 == 0)
    assert progress.wait(process, [tmp_path / "logs", tmp_path / "none"], 100) == 7
    assert (process.now, process.stopped) == (1001, False)


def test_what_makes_none_is_ended(clocked, tmp_path):
    process = clocked(1000, lambda second: second < 50)
    with pytest.raises(progress.Hung, match="no progress for 100 s"):
        progress.wait(process, [tmp_path / "logs"], 100)
    assert process.stopped
    assert 149 <= process.now <= 153


def test_a_program_that_hangs_is_shown_with_what_it_said():
    code = "import time; print('one', flush=True); time.sleep(600)"
    with pytest.raises(progress.Hung, match=r"(?s)no progress for 2 s.*one"):
        progress.run([sys.executable, "-c", code], quiet_s=2)


def test_a_program_is_run_as_by_subprocess():
    code = "import os, sys; print(os.environ['X']); print('oh', file=sys.stderr); sys.exit(3)"
    done = progress.run([sys.executable, "-c", code], env={"X": "y"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "y\n", "oh\n")
