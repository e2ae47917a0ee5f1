"""`bench scaling`: the training step over rank counts, each count a job of its own.

The batch of a rank stays the same, so n ranks do n times the work of one. Speed-up is the examples per second
of n ranks over those of one rank that trains alone, and efficiency is the speed-up per thread: divided by the
threads of all ranks, over those of the one. On one host the ranks share cores and memory, which costs
efficiency before anything is communicated; the step without communication, at the same number of ranks, tells
how much. There, one process with all cores is what a user would run instead: it stands beside, on the joined
batch.
"""

import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from mpisgd.tools.bench.jobs import run_job
from mpisgd.tools.bench.report.rows import NONE, ONE_PROCESS, OURS

__all__ = ["launch", "scaling_rows"]

ALONE = "no communication"
VARIANTS = (ALONE, OURS, *ONE_PROCESS)


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
    """Return a row for each model, batch and variant.

    Args:
        records: of `bench step`, several for each rank count; one of them with a single rank.
    """
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    batches: dict[str, int] = {}
    for record in records:
        for model, variant, row in _steps(record["rows"]):
            found.setdefault((model, record["size"], variant), []).append(row)
            batches[model] = record["models"][model]["batch_per_rank"]
    merged = {key: _merged(rows) for key, rows in found.items()}
    rows = []
    for (model, size, variant), row in merged.items():
        alone = merged[model, 1, ALONE]
        one_process = [merged[model, size, name] for name in ONE_PROCESS if (model, size, name) in merged]
        batch, ranks = size * batches[model], 1 if variant in ONE_PROCESS else size
        speed_up = size * alone["median_s"] / row["median_s"]
        rows.append(
            {
                "model": model,
                "batch": batch,
                "variant": variant,
                "ranks": ranks,
                **row,
                "examples_per_s": batch / row["median_s"],
                "speed_up": speed_up,
                "efficiency": speed_up * alone["threads"] / (ranks * row["threads"]),
                "ratio_to_one_process": _ratio_to_fastest(row, one_process),
            }
        )
    return sorted(rows, key=lambda row: (row["model"], row["batch"], VARIANTS.index(row["variant"])))


def _merged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one row of several jobs, of those that have chosen the fastest one's number of threads."""
    threads = min(rows, key=itemgetter("median_s"))["threads"]
    rows = [row for row in rows if row["threads"] == threads]
    return {
        "threads": threads,
        "median_s": statistics.median(row["median_s"] for row in rows),
        "min_s": min(row["min_s"] for row in rows),
        "max_s": max(row["max_s"] for row in rows),
    }


def _ratio_to_fastest(row: dict[str, Any], others: Sequence[dict[str, Any]]) -> float | None:
    return row["median_s"] / min(other["median_s"] for other in others) if others else None


def _steps(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the rows of each model that are compared; without communication the faster one counts."""
    for model, section in groupby(rows, key=itemgetter("model")):
        here = {row["variant"]: row for row in section}
        alone = [here[name] for name in NONE if name in here]
        yield model, ALONE, min(alone, key=itemgetter("median_s"))
        for name in VARIANTS:
            if name in here:
                yield model, name, here[name]
