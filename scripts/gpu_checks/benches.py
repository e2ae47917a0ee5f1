"""`bench collectives` and `bench step` on the GPU, beside torch's NCCL in the same run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_checks.catalog import NCCL, Setting
from gpu_checks.finding import FAILS, Finding
from gpu_checks.jobs import environment, launch, tail
from gpu_checks.step_profile import MAX_RATIO
from mpisgd.tools.bench.jobs import mpirun
from mpisgd.tools.bench.report.rows import OURS, as_bytes, as_time

__all__ = ["BENCHES", "Bench", "run_bench"]

LIMIT_S = 240.0
COLLECTIVES = "all_reduce,reduce_scatter,all_gather,broadcast,all_to_all"
Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """A command of `python -m mpisgd bench`.

    Attributes:
        what: it measures.
        options: of the command.
        judge: what its rows say; given whether the ratio to the step without mpisgd counts.
    """

    what: str
    options: Sequence[str]
    judge: Callable[[Sequence[Row], bool], Finding]


def _of_steps(rows: Sequence[Row], counts: bool) -> Finding:
    """How a step compares with that without communication, and with DDP on NCCL."""
    figures, told = {}, []
    for row in (row for row in rows if row["variant"] == OURS):
        model, ratio = row["model"], row["ratio_to_no_communication"]
        figures[f"{model}: ratio to none"] = ratio
        told.append(f"{model}: {ratio:.3f} times the step without communication")
        beside = [r["median_s"] for r in rows if r["model"] == model and r["variant"].startswith("DDP nccl")]
        if beside:
            figures[f"{model}: ratio to DDP on NCCL"] = row["median_s"] / min(beside)
            told.append(f"{row['median_s'] / min(beside):.3f} times DDP on NCCL")
    ratios = [ratio for name, ratio in figures.items() if name.endswith("to none")]
    expected = f"at most {MAX_RATIO:g} times the step without communication" if counts else "figures only"
    holds = bool(ratios) and (not counts or max(ratios) <= MAX_RATIO)
    return Finding(Finding.of(holds, "", "").verdict, expected, "; ".join(told), figures)


def _of_collectives(rows: Sequence[Row], counts: bool) -> Finding:
    """How the longest calls compare with torch's."""
    longest = max(row["bytes"] for row in rows)
    told = []
    for name in dict.fromkeys(row["collective"] for row in rows):
        medians = {
            r["variant"]: r["median_s"] for r in rows if (r["collective"], r["bytes"]) == (name, longest)
        }
        told += [f"{name}: " + ", ".join(f"{variant} {as_time(s)}" for variant, s in medians.items())] * bool(
            medians
        )
    return Finding.of(True, "figures only", f"{as_bytes(longest)}: {'; '.join(told)}")


BENCHES = {
    "bench-collectives": Bench(
        "collectives beside torch's on NCCL",
        ("collectives", "--only", COLLECTIVES, "--sizes", "4KiB,256KiB,16MiB,256MiB", "--budget", "1"),
        _of_collectives,
    ),
    "bench-step": Bench(
        "training steps beside DDP on NCCL",
        ("step", "--models", "mlp,transformer", "--budget", "20"),
        _of_steps,
    ),
}


def run_bench(
    bench: Bench, setting: Setting, folder: Path, limit_s: float, *, simulated: bool, quick: bool
) -> tuple[Finding, float, dict[str, Any] | None]:
    """Run a bench; what it says, the seconds it took, and its record."""
    folder.mkdir(parents=True)
    module = "gpu_checks.simulated_command" if simulated else "mpisgd"
    command = [*mpirun(), "-n", str(setting.size), sys.executable, "-m", module, "bench", *bench.options]
    command += ["--device", "gpu", "--json", str(folder / "record.json"), "--peers", "nccl"]
    command += ["--quick"] * (simulated or quick)
    begun, log = time.monotonic(), folder / "log.txt"
    problem = launch(command, environment(setting.size, setting.transport), log, limit_s)
    took_s = time.monotonic() - begun
    file = folder / "record.json"
    if problem or not file.exists():
        last = tail(log)[-1:]
        text = "; ".join([problem or "no record", *last])
        return Finding(FAILS, "a record", text), took_s, None
    record = json.loads(file.read_text())
    record.pop("ranks")  # with names of hosts
    record.pop("command")
    counts = setting == Setting(1, NCCL) and not simulated and not quick
    return bench.judge(record["rows"], counts), took_s, record
