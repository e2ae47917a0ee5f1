"""`pytest --threads N`: tests of tests/mpi run on ranks that are threads, and are not skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = "tests/mpi/optim/test_optimizers.py"


def run(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, TESTS]
    done = subprocess.run(
        [*command, "-k", "joined_batch and momentum"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    return done.stdout.splitlines()[-1]


def test_they_run_where_ranks_are_threads_and_are_skipped_without_ranks():
    with_ranks, without = run("--threads", "3"), run()
    assert " passed" in with_ranks
    assert "skipped" not in with_ranks
    assert "failed" not in with_ranks
    assert " passed" not in without
