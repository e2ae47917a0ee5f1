"""The jobs that `verify` starts by itself: for each number of ranks, and each way to reach each other."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mpisgd.errors import JobError
from mpisgd.tools.bench.jobs import run_command, run_job
from mpisgd.tools.verification.cell import Cell
from mpisgd.tools.verification.hosts import on_hosts
from mpisgd.tools.verification.matrix import LOSS, MESSAGES, SHARED_MEMORY, SOME, Selection, hosts_text
from mpisgd.tools.verification.mode import Mode
from mpisgd.tools.verification.sabotage import Sabotage

__all__ = ["Started", "append_cell", "jobs_of", "run_started"]

NUM_HOSTS = 2
LARGE_FROM = 4  # ranks, if more are wanted for some modes
RANKS_PER_HOST = "MPISGD_RANKS_PER_HOST"


class Started(NamedTuple):
    """One job.

    Attributes:
        ranks: how many.
        transport: how they reach each other.
        settings: variables of its environment.
        hosts: ranks of each emulated host; empty for this machine as it is.
        losing: what is sabotaged in a job that loses a rank; None in others.
        beyond: it has only modes that need more ranks than these.
        plain: it has only modes that do not load much of torch.
    """

    ranks: int
    transport: str = SHARED_MEMORY
    settings: Mapping[str, str] = MappingProxyType({})
    hosts: tuple[int, ...] = ()
    losing: Sabotage | None = None
    beyond: int = 0
    plain: bool = False

    def has(self, mode: Mode) -> bool:
        """Return whether a mode makes sense in it."""
        nodes = NUM_HOSTS if self.hosts or RANKS_PER_HOST in self.settings else 1
        fits = mode.applies(self.ranks, nodes, shared_memory=self.transport != MESSAGES)
        is_needed = mode.sizes[0] > self.beyond and not (self.plain and mode.loads_much)
        return fits and is_needed and mode.loses_rank == (self.losing is not None)


def jobs_of(
    selection: Selection, ranks: Sequence[int], modes: Sequence[Mode], *, emulates_hosts: bool = False
) -> list[Started]:
    """Return the jobs for these numbers of ranks, on one host, on two, by messages only, and with losses.

    Where `selection` is quick, the largest of several numbers is tried on two hosts alone, and no other one
    is; that job alone has modes that load much. Else modes that need more ranks than any of these get
    one of that size; if modes are broken that is a job for them alone, since each takes a turn for each
    sabotage.
    """
    several = [count for count in ranks if count > 1]
    alone = {max(several)} if selection.quick and len(several) > 1 else set()
    plain = selection.quick and bool(several)
    jobs = [Started(count, plain=plain) for count in ranks if count not in alone]
    if several:
        some = SOME if SOME in several else max(several)
        for count in sorted({max(several)} if selection.quick else {some, max(several)}):
            jobs.append(_on_two_hosts(count, emulates_hosts))
        if not selection.quick:
            jobs.append(Started(some, MESSAGES, {"MPISGD_SHARED_MEMORY": "0"}))
        large = {mode.sizes[0] for mode in modes if mode.sizes[0] > max(several)}
        beyond = max(several) if selection.sabotage else 0
        if max(several) >= LARGE_FROM:
            jobs += [Started(count, beyond=beyond) for count in sorted(large)]
        jobs += [Started(some, LOSS, losing=sabotage) for sabotage in selection.sabotages]
    return [job for job in jobs if any(map(job.has, modes))]


def _on_two_hosts(ranks: int, emulated: bool) -> Started:
    """The first has half of the ranks, and one more if they are odd."""
    first = (ranks + 1) // NUM_HOSTS
    if emulated:
        return Started(ranks, hosts_text(NUM_HOSTS, pretended=False), hosts=(first, ranks - first))
    return Started(ranks, hosts_text(NUM_HOSTS, pretended=True), {RANKS_PER_HOST: str(first)})


def run_started(
    job: Started,
    selection: Selection,
    launcher: Sequence[str],
    limit_s: float,
    report: Callable[[Cell], None],
    cluster: Sequence[str] = (),
) -> list[Cell]:
    """Run one job; report its cells as they come, and return them.

    If it fails, or does not end in time, the last one says so.

    Args:
        job: what to run.
        selection: what it verifies.
        launcher: the words that start it on this machine.
        limit_s: when to give up.
        report: called with each cell.
        cluster: the words that start it on emulated hosts.
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

            words = ["mpisgd", "verify", *_options(selection, job), "--cells", str(path)]
            try:
                _run(job, words, launcher, cluster, limit_s, read)
            except JobError as exc:
                read()
                if job.losing is None or not cells:  # else mpirun tells of the rank that was killed
                    cells.append(_ended_early(job, cells, str(exc)))
                    report(cells[-1])
            read()
    return cells


def _run(
    job: Started,
    words: Sequence[str],
    launcher: Sequence[str],
    cluster: Sequence[str],
    limit_s: float,
    watch: Callable[[], None],
) -> None:
    if not job.hosts:
        run_job(launcher, job.ranks, words, limit_s, watch=watch, settings=job.settings)
        return
    command = on_hosts(cluster, job.hosts, [sys.executable, "-m", *words])
    name = f"verify on {job.ranks} ranks of {len(job.hosts)} emulated hosts"
    run_command(command, os.environ, name, limit_s, watch=watch)


def _ended_early(job: Started, cells: Sequence[Cell], why: str) -> Cell:
    """Return the cell of a job that has not come to its end."""
    after = f" after the mode {cells[-1].mode}" if cells else ""
    said = f"the job ended early{after}: {why}"
    return Cell("jobs", "to the end", job.ranks, job.transport, "float64", "none", float("inf"), 0.0, said)


def _options(selection: Selection, job: Started) -> list[str]:
    flags = [
        flag for flag, is_set in (("--quick", selection.quick), ("--sabotage", selection.sabotage)) if is_set
    ]
    options = [*flags, *(["--only", selection.only] if selection.only else [])]
    options += [] if job.losing is None else ["--losing", job.losing.value]
    options += ["--plain"] if job.plain else []
    return options + (["--beyond", str(job.beyond)] if job.beyond else [])


def append_cell(path: Path, cell: Cell) -> None:
    """Write a cell for the process that has started this job."""
    with path.open("a") as file:
        file.write(json.dumps(cell) + os.linesep)


def _read(lines: Iterator[str]) -> Iterator[Cell]:
    """Yield the cells that have been written since; a line is written at once."""
    for line in lines:
        yield Cell(*json.loads(line))
