"""Strangers at work while a job starts; `scripts/strangers` has more of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "security" / "stranger_starts.py"


@pytest.mark.parametrize("starts", [1, pytest.param(100, marks=pytest.mark.long)])
def test_no_stranger_comes_in_while_rpc_the_store_and_top_start(starts):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--starts", str(starts)],
        capture_output=True,
        text=True,
        timeout=120 + 20 * starts,
    )
    if "no network namespaces here" in done.stderr:
        pytest.skip("strangers attack whatever they see: this system allows no network of their own")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"0 of {starts} starts let a stranger in" in done.stdout
    attempts = [int(line.split()[-1]) for line in done.stdout.splitlines() if " refused " in line]
    assert all(attempts), done.stdout
