"""What `python -m mpisgd bench` leaves behind: a job that ends, a record of it, tables, files."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

import mpisgd
from mpisgd.tools.bench.report.plots import need_matplotlib, plot
from mpisgd.tools.bench.report.rows import as_bytes, as_number
from mpisgd.tools.bench.report.tables import new_table, one_line, show, tables_of
from mpisgd.tools.cli.program import is_reporting_rank
from mpisgd.tools.cli.provenance import machine, provenance

if TYPE_CHECKING:
    from mpisgd.tools.bench.peers.remote import Peers

__all__ = ["Output", "Reporter", "log_rows", "measure_in_job", "on_machine", "title"]

REPORT_S = 5.0  # how much later than the first rank the others end the job at the time limit
WIDE = 200  # columns, where there is no terminal
P = TypeVar("P")


@dataclass(frozen=True)
class Output:
    """Where a record goes besides the terminal.

    Attributes:
        json_file: all of it, as data.
        plot_file: a picture of it.
        text_file: the tables.
    """

    json_file: Path | None
    plot_file: Path | None = None
    text_file: Path | None = None

    def __post_init__(self) -> None:
        """Raise now rather than after minutes of measuring."""
        for path in (self.json_file, self.plot_file, self.text_file):
            if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
                raise mpisgd.JobError(
                    f"cannot write {path}: {path.parent} is no folder that can be written to"
                )
        if self.plot_file is not None:
            need_matplotlib()

    def put(self, record: dict[str, Any]) -> None:
        """Print the tables and write the files."""
        show(tables_of(record["kind"], record["rows"]), _notes(record))
        self.write(record)

    def put_cells(
        self, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str], command: str = ""
    ) -> None:
        """Print a table whose cells are text, and write it as a record of what grows.

        Args:
            columns: their headings.
            rows: the cells.
            notes: of the record.
            command: what was typed, if it was not this program.
        """
        table = new_table("", columns, [])
        for row in rows:
            table.add_row(*row)
        show([table], [], width=None if sys.stdout.isatty() else WIDE)
        record = {"kind": "growth", **provenance(), "notes": notes, "columns": columns, "cells": rows}
        if command:
            record["command"] = command
        if self.json_file is not None:
            self.json_file.write_text(json.dumps(record, indent=1) + "\n")

    def write(self, record: dict[str, Any]) -> None:
        """Write the files; each is a whole one at any time."""
        if self.json_file is not None:
            with _replaced(self.json_file) as path:
                path.write_text(json.dumps(record, indent=1) + "\n")
        if self.text_file is not None:
            with _replaced(self.text_file) as path, path.open("w") as file:
                show(tables_of(record["kind"], record["rows"]), _notes(record), file)
        if self.plot_file is not None:
            with _replaced(self.plot_file) as path:
                plot(path, record)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Yield where to write what then takes the place of `path`."""
    beside = path.with_name(f".{path.name}.new")
    yield beside
    beside.replace(path)


@dataclass(frozen=True)
class Reporter:
    """Says what came out as soon as it is known, and writes what is to be kept.

    Attributes:
        header: of the record.
        output: where it goes.
    """

    header: dict[str, Any]
    output: Output

    def __call__(self, what: str, rows: list[dict[str, Any]], so_far: dict[str, Any] | None = None) -> None:
        """Print the medians of one case on rank 0; write the record so far, where there is one."""
        log_rows(what, rows)
        if so_far is not None and mpisgd.rank() == 0:
            self.output.write({**self.header, **so_far})


def measure_in_job(
    kind: str,
    run: "Callable[[P, Peers, Reporter], dict[str, Any]]",
    plan: P,
    output: Output,
    peers: Sequence[str] = (),
    *,
    limit_s: float,
    threads: int = 0,
    min_hosts: int = 1,
) -> None:
    """Measure on all ranks; rank 0 says what came out. Collective.

    Args:
        kind: the command.
        run: returns the record's rows and whatever else belongs to it; given the plan, the peers, and what
            to call with the rows of each case, maybe with all that is to be kept if the job ends now.
        plan: what to measure.
        output: where it goes.
        peers: other frameworks to measure beside.
        limit_s: when to give up.
        threads: of torch; 0: mpisgd's choice.
        min_hosts: how many there must be.
    """
    from mpisgd.tools.bench.peers.remote import open_peers

    with _job(limit_s, threads, min_hosts), open_peers(peers) as running:
        reporter = Reporter(_header(kind, running), output)
        record = {**reporter.header, **run(plan, running, reporter)}
        if mpisgd.rank() == 0:
            output.put(record)


@contextlib.contextmanager
def _job(limit_s: float, threads: int, min_hosts: int) -> Iterator[None]:
    """Begin the job, and end it in time: a peer, or MPI itself, might wait for ever."""
    mpisgd.init(num_threads=threads or None)
    if mpisgd.num_nodes() < min_hosts:
        found = mpisgd.num_nodes()
        raise mpisgd.JobError(f"expected ranks on {min_hosts} hosts or more, found {found}", exit_code=2)
    timer = threading.Timer(limit_s, _give_up, [limit_s])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(limit_s: float) -> None:
    if is_reporting_rank():
        typer.echo(f"bench: no end within {limit_s:.0f} s (--time-limit); the job ends", err=True)
    else:
        time.sleep(REPORT_S)  # the launcher ends all with the first: that one is to have printed
    os._exit(124)


def _header(kind: str, peers: "Peers") -> dict[str, Any]:
    """Return the facts that one must know to repeat a measurement. Collective."""
    from mpisgd.tools.cli.collect_env import mpi_info, rank_info, settings

    mine = dataclasses.asdict(rank_info(settings(), mpi_info()))
    mine["mpi"]["libmpi"] = Path(mine["mpi"]["libmpi"]).name  # where it lies concerns nobody else
    facts: list[Any] = [None] * mpisgd.size()
    mpisgd.all_gather_object(facts, mine)
    size, hosts = mpisgd.size(), mpisgd.num_nodes()
    library = mine["mpi"]["library"]
    threads = None if kind == "step" else mine["num_threads"]  # there each contender has its own
    return {
        "kind": kind,
        **provenance(),
        "title": title(kind, size=size, hosts=hosts, threads=threads, library=library),
        "size": size,
        "hosts": hosts,
        "peers": {name: peer.version for name, peer in peers.running.items()},
        "peers_left_out": peers.left_out,  # grows while measuring
        "ranks": facts,
    }


def title(kind: str, *, size: int, hosts: int, threads: int | None, library: str) -> str:
    """Return one line for tables and plots."""
    of_torch = "" if threads is None else f", {threads} torch thread(s) each"
    ranks = f"{as_number(size, 'rank')} on {hosts} host(s)"
    return f"{kind}: {ranks}, {on_machine()}{of_torch}, {library.split(',')[0]}"


def on_machine() -> str:
    """Return the cores, the processor and torch, for a title."""
    here = machine()
    return f"{here['cores']} cores ({here['processor']}), torch {importlib.metadata.version('torch')}"


def log_rows(what: str, rows: list[dict[str, Any]]) -> None:
    """Print the medians of one case at once, where tables do not go."""
    if is_reporting_rank():
        typer.echo(one_line(what, rows), err=True)


def _notes(record: dict[str, Any]) -> list[str]:
    """Return the lines below the tables."""
    absent = [f"left out: {name}: {why}" for name, why in record.get("peers_left_out", {}).items()]
    where: dict[str, list[str]] = {}
    for entry in record.get("left_out", []):
        what = entry.get("model") or f"{entry['collective']} {entry['dtype']} {as_bytes(entry['bytes'])}"
        where.setdefault(f"{entry['variant']}: {entry['reason']}", []).append(what)
    absent += [f"left out: {why} ({', '.join(what)})" for why, what in where.items()]
    return [record["title"], *record.get("notes", []), *absent]
