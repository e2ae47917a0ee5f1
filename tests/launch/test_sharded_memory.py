"""What each rank takes, by the kernel's count, is what the formulas of ZeRO say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher import run_python

PROGRAM = Path(__file__).parent / "programs" / "sharded_memory.py"
MB = 10**6
OVERHEAD = 6 * MB  # staging memory of the group, buckets on their way, Python


@pytest.mark.parametrize(
    "strategy",
    [pytest.param("Synchronous()", marks=pytest.mark.long), "Sharded(stage=1)", "Sharded(stage=2)"],
)
def test_a_rank_takes_what_was_predicted(strategy):
    done = run_python(str(PROGRAM), strategy, num_ranks=2, env={"MPISGD_KEEP_MEMORY": "0"}, fresh=True)
    assert done.returncode == 0, done.stderr
    for line in map(json.loads, done.stdout.splitlines()):
        assert abs(line["seen"] - line["predicted"]) < OVERHEAD, line


def test_the_command_prints_a_table():
    done = run_python("-m", "mpisgd", "memory", "--parameters", "1e9", "--optimizer", "Adam", "--ranks", "4")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("Sharded(stage=2) ")]
    assert lines[0].split()[1:] == ["4", "GB", "1", "GB", "2", "GB", "23.8", "MB", "0", "B", "7.024", "GB"]


def test_the_command_knows_models_by_name():
    done = run_python(
        *("-m", "mpisgd", "memory", "--model", "torch.nn:Identity", "--optimizer", "SGD"), num_ranks=None
    )
    assert done.returncode == 0, done.stderr
    refused = run_python("-m", "mpisgd", "memory", "--model", "no_such_module:make")
    assert refused.returncode != 0
    assert "no_such_module" in refused.stderr
