"""The jobs that `verify` starts by itself: for each number of ranks, and without shared memory."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mpisgd.bench.jobs import run_job
from mpisgd.verification.cell import Cell
from mpisgd.verification.matrix import MESSAGES, SHARED_MEMORY, Plan

__all__ = ["Started", "append_cell", "jobs_of", "run_started"]

WITHOUT_SHARED_MEMORY = 3  # ranks: no power of two


class Started(NamedTuple):
    """One job.

    Attributes:
        ranks: how many.
        transport: how they reach each other.
    """

    ranks: int
    transport: str


def jobs_of(ranks: Sequence[int]) -> list[Started]:
    """Return the jobs for these numbers of ranks, and one whose ranks send messages."""
    jobs = [Started(count, SHARED_MEMORY) for count in ranks]
    several = [count for count in ranks if count > 1]
    if several:
        most = WITHOUT_SHARED_MEMORY if WITHOUT_SHARED_MEMORY in several else max(several)
        jobs.append(Started(most, MESSAGES))
    return jobs


def run_started(
    job: Started, plan: Plan, launcher: Sequence[str], limit_s: float, report: Callable[[Cell], None]
) -> list[Cell]:
    """Run one job; report its cells as they come, and return them.

    Raises:
        JobError: it failed, or did not end in time.
    """
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells"
        path.touch()
        with path.open() as file:

            def read() -> None:
                for cell in _read(file):
                    cells.append(cell)
                    report(cell)

            settings = {"MPISGD_SHARED_MEMORY": "0"} if job.transport == MESSAGES else {}
            words = ["mpisgd", "verify", *_options(plan), "--cells", str(path)]
            run_job(launcher, job.ranks, words, limit_s, watch=read, settings=settings)
            read()
    return cells


def _options(plan: Plan) -> list[str]:
    flags = [flag for flag, is_set in (("--quick", plan.quick), ("--sabotage", plan.sabotage)) if is_set]
    return [*flags, *(["--only", plan.only] if plan.only else [])]


def append_cell(path: Path, cell: Cell) -> None:
    """Write a cell for the process that has started this job."""
    with path.open("a") as file:
        file.write(json.dumps(cell) + os.linesep)


def _read(lines: Iterator[str]) -> Iterator[Cell]:
    """Yield the cells that have been written since; a line is written at once."""
    for line in lines:
        yield Cell(*json.loads(line))
