"""Run programs on a cluster of pretended hosts, as `./scripts/cluster` does; a hang is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import progress
from launcher import python

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "scripts" / "emulation" / "virtual_cluster.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@lru_cache(maxsize=1)
def obstacle() -> str:
    """Why there can be no cluster on this machine; empty if there can."""
    done = subprocess.run([*COMMAND, "--check"], capture_output=True, text=True, timeout=30)
    return done.stderr.strip() or "the check failed" if done.returncode else ""


def run_on(
    hosts: str,
    *program: str,
    options: str = "",
    rate: str = "1gbit",
    logs: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program on hosts such as "2,1"; `options` are mpirun's. It may write to `logs`, too."""
    settings = ["--hosts", hosts, "--rate", rate, "--mpirun", options]
    command = [*COMMAND, *settings, "--", *program]
    return progress.run(command, env={**ENVIRONMENT, **(env or {})}, cwd=ROOT, written=logs)


def run_code(hosts: str, code: str, *, options: str = "") -> subprocess.CompletedProcess[str]:
    """As `run_on`, for the text of a Python program."""
    return run_on(hosts, python(), "-c", textwrap.dedent(code), options=options)
