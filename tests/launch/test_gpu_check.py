"""`./scripts/gpu_check`: without a GPU it says what it leaves out; on simulated ones its jobs run checks.

Faults that end a process or keep it waiting are put into jobs of their own; see tests/gpu/test_gpu_checks.py.
"""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import progress
import pytest
import torch
from gpu_checks import jobs
from gpu_checks.catalog import CHECKS, NCCL, Setting
from gpu_checks.gpu import FAILS
from launcher import python
from simulated_gpu.guard import has_compiler

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("future",)  # the others are called in tests/gpu, without a job of their own


def gpu_check(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Run it; its exit code, the report as data and as text."""
    command = [str(ROOT / "scripts" / "gpu_check"), "--output", str(folder), *options]
    done = progress.run(command, env={**os.environ, "PYTHON": python()}, written=[folder])
    assert (folder / "report.json").exists(), done.stdout + done.stderr
    return (
        done.returncode,
        json.loads((folder / "report.json").read_text()),
        (folder / "report.txt").read_text(),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_everything_is_left_out_with_the_reason(tmp_path):
    code, report, text = gpu_check(tmp_path / "out")
    assert code == 2
    assert {check["verdict"] for check in report["checks"]} == {"left out"}
    assert "torch sees no GPU" in text
    assert report["machine"]["versions"]["torch"] in text
    assert report["commit"] in text


def check_verdicts(report: dict[str, Any]) -> None:
    """All hold or were left out."""
    wrong = [check for check in report["checks"] if check["verdict"] not in ("holds", "left out")]
    assert not wrong, wrong


@pytest.mark.long  # a check with its fault runs in a job below, and all are called in tests/gpu
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler to simulate a GPU")
def test_on_simulated_gpus_checks_are_done_in_jobs(tmp_path):
    code, report, text = gpu_check(tmp_path / "out", "--simulated", "--quick", "--only", ",".join(SHORT))
    check_verdicts(report)
    assert {check["name"] for check in report["checks"] if check["verdict"] != "left out"} == set(SHORT)
    assert code == 0
    assert "GPUs: simulated" in text


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler to simulate a GPU")
def test_on_simulated_gpus_all_checks_are_done(tmp_path):
    _, report, _ = gpu_check(tmp_path / "out", "--simulated", "--quick")
    check_verdicts(report)
    assert {"bench-step 2 mpi", "bench-collectives 2 mpi"} <= set(report["benches"])


FAULTS = {
    # torch's own timeout and what it does then, as for any process group.
    "group-timeout": (
        """
        import datetime
        from mpisgd.transport.device import nccl_group
        nccl_group.SETTINGS, nccl_group.NEVER = {}, datetime.timedelta(seconds=2)
        """,
        "every process comes to its end",
    ),
    # What NCCL has in flight is ended by the timeout alone.
    "lost-rank": (
        """
        from mpisgd.transport.device import nccl_watch
        rank.TIMEOUT_S = 8.0
        nccl_watch.waiting.cancel_reason = lambda: None
        nccl_watch.InFlight.failure = lambda self: None
        """,
        "an error of mpisgd within 4 s",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler to simulate a GPU")
def test_a_check_fails_with_its_fault(name, tmp_path, monkeypatch):
    fault, expected = FAULTS[name]
    program = tmp_path / "rank_with_a_fault.py"
    program.write_text(f"from gpu_checks import rank\n{textwrap.dedent(fault)}\nrank.main()\n")
    monkeypatch.setattr(jobs, "RANK", (str(program),))
    options = ["--simulated", "--quick"]
    finding, _ = jobs.run_check(CHECKS[name], Setting(2, NCCL), tmp_path / name, 90.0, options)
    assert (finding.verdict, finding.expected) == (FAILS, expected), finding
