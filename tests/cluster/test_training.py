"""The main job on several hosts: the curve of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import progress
import pytest
from clusters import ENVIRONMENT, ROOT, run_on
from launcher import python

TRAIN = [str(ROOT / "scripts" / "train.py"), "--dtype", "float64"]
TRAIN += ["--model", "mlp", "--batch-size", "120", "--epochs", "3", "--metrics"]


def losses(metrics: Path) -> list[Any]:
    return [
        value
        for line in metrics.read_text().splitlines()
        for name, value in json.loads(line).items()
        if "loss" in name
    ]


LONG = pytest.mark.long


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[Any]:
    """The losses of one process without mpirun."""
    metrics = tmp_path_factory.mktemp("alone") / "metrics.jsonl"
    env = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    done = progress.run([python(), *TRAIN, str(metrics)], env=env)
    assert done.returncode == 0, done.stderr
    return losses(metrics)


@pytest.mark.parametrize("hosts", ["2,2", pytest.param("1,1,1", marks=LONG), pytest.param("2,1", marks=LONG)])
def test_curve_equals_one_process(hosts, alone, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    done = run_on(hosts, python(), *TRAIN, str(metrics))
    assert done.returncode == 0, done.stderr
    assert len(alone) >= 3
    assert losses(metrics) == pytest.approx(alone, rel=1e-10)


@LONG
def test_curve_differs_without_communication(alone, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    done = run_on("2,1", python(), *TRAIN, str(metrics), "--no-sync")
    assert done.returncode == 0, done.stderr
    assert losses(metrics) != pytest.approx(alone, rel=1e-4)
