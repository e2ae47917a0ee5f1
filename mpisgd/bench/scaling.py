"""`bench scaling`: the training step over rank counts, each count a job of its own.

The batch of a rank stays the same, so n ranks do n times the work of one: efficiency is the examples per
second of n ranks over n times those of one rank that trains alone. On one host the ranks share cores and
memory, which costs efficiency before anything is communicated; the step without communication, at the same
number of ranks, tells how much.
"""

import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from mpisgd.bench.jobs import run_job
from mpisgd.bench.report.rows import OURS

__all__ = ["launch", "scaling_rows"]

ALONE = "no communication"


def launch(
    launcher: Sequence[str], num_ranks: int, arguments: Sequence[str], limit_s: float
) -> dict[str, Any]:
    """Run `python -m mpisgd bench ARGUMENTS` on some ranks; return its record.

    Raises:
        JobError: it failed, or did not end in time; with the last line it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        run_job(launcher, num_ranks, ["mpisgd", "bench", *arguments, "--json", str(file)], limit_s)
        record: dict[str, Any] = json.loads(file.read_text())
        return record


def scaling_rows(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each model, variant and rank count.

    Args:
        records: of `bench step`, several for each rank count; one of them with a single rank.
    """
    seconds: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    batches: dict[str, int] = {}
    for record in records:
        for model, variant, row in _steps(record["rows"]):
            seconds.setdefault((model, variant, record["size"]), []).append(row)
            batches[model] = record["models"][model]["batch_per_rank"]
    rows = []
    for (model, variant, size), found in seconds.items():
        median_s = statistics.median(row["median_s"] for row in found)
        alone_s = statistics.median(row["median_s"] for row in seconds[model, ALONE, 1])
        rows.append(
            {
                "model": model,
                "variant": variant,
                "ranks": size,
                "median_s": median_s,
                "min_s": min(row["min_s"] for row in found),
                "max_s": max(row["max_s"] for row in found),
                "examples_per_s": size * batches[model] / median_s,
                "speed_up": size * alone_s / median_s,
                "efficiency": alone_s / median_s,
            }
        )
    return sorted(rows, key=lambda row: (row["model"], row["variant"] != ALONE, row["ranks"]))


def _steps(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield mpisgd's row of each model, and the fastest one of those without communication."""
    for model, section in groupby(rows, key=itemgetter("model")):
        here = list(section)
        alone = [row for row in here if not row["communicates"]]
        yield model, ALONE, min(alone, key=itemgetter("median_s"))
        yield model, OURS, next(row for row in here if row["variant"] == OURS)
