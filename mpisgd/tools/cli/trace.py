"""`python -m mpisgd trace FILES`: merge the timelines of ranks, and say in numbers what is in them."""

from pathlib import Path
from textwrap import shorten
from typing import Any

import typer
from rich.table import Table

from mpisgd.errors import InvalidArgument, JobError
from mpisgd.timeline.files import merge, read_events
from mpisgd.tools.bench.report.rows import as_bytes, as_time
from mpisgd.tools.bench.report.tables import new_table, show
from mpisgd.tools.cli.program import bad_input
from mpisgd.tools.timeline.summary import Summary, summarise

__all__ = ["trace"]

LONGEST_NAME = 60


def trace(
    files: list[Path] = typer.Argument(
        ..., help="Timelines of single ranks or of all, or folders with them."
    ),
    out: Path | None = typer.Option(None, help="Write one file with all timelines for Perfetto."),
    html: Path | None = typer.Option(None, help="Write an HTML page with charts."),
    steps: str = typer.Option(
        "", help="Steps FIRST:LAST in the timeline of the page; default: typical ones."
    ),
    top: int = typer.Option(15, min=1, help="Number of rows: the operations that took longest."),
) -> None:
    """Merge timelines, and sum them up: time per operation, who came last, what was hidden."""
    chosen = _steps(steps) if steps else None
    with bad_input():
        events = _read(files)
        if out is not None:
            merge(events, out)
        if html is not None:
            from mpisgd.tools.timeline.report.page import data_of, html_of  # numpy takes a moment to load

            html.write_text(html_of(data_of(events, ", ".join(path.name for path in files), chosen)))
    summary = summarise(events)
    show([_operations(summary, top), _stragglers(summary), _hidden(summary)], _notes(summary))


def _steps(text: str) -> tuple[int, int]:
    """Return the first and the last step of FIRST:LAST, or of one number."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and (last or first).isdecimal() and int(first) <= int(last or first)):
        raise JobError(f"--steps {text}: expected a step, or FIRST:LAST, as in 500:505")
    return int(first), int(last or first)


def _read(given: list[Path]) -> list[dict[str, Any]]:
    """Return the events of all files, those in folders included.

    Raises:
        InvalidArgument: no file, not a timeline, or a rank in two of them.
    """
    files = [file for path in given for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    events: list[dict[str, Any]] = []
    of_rank: dict[int, Path] = {}
    for file in files:
        for event in read_events(file):
            if event["name"] == "mpisgd" and of_rank.setdefault(event["pid"], file) != file:
                raise InvalidArgument(f"rank {event['pid']} is in {of_rank[event['pid']]} and in {file}")
            events.append(event)
    if not of_rank:
        raise InvalidArgument("no timeline in " + (", ".join(map(str, files)) or "these folders"))
    return events


def _operations(summary: Summary, top: int) -> Table:
    numbers = ["count", "total", "median", "waiting", "bytes", "GB/s"]
    table = new_table("operations, of an average rank", ["operation", "where", "algorithm"], numbers)
    for row in summary.rows[:top]:
        times = [as_time(value / 1e6) for value in (row.total_us, row.median_us, row.wait_us)]
        rate = f"{row.bytes_per_s / 1e9:.3g}" if row.nbytes else "-"
        table.add_row(
            row.kind, row.where, row.algorithm, str(row.num), *times, as_bytes(int(row.nbytes)), rate
        )
    return table


def _stragglers(summary: Summary) -> Table:
    numbers = ["came last", "share", "total", "median", "worst"]
    table = new_table("stragglers: how long others waited for one rank", ["rank"], numbers)
    table.add_column("worst at")
    for late in summary.late:
        share = f"{late.times / summary.num_common:.0%}"
        times = [as_time(value / 1e6) for value in (late.total_us, late.median_us, late.worst_us)]
        table.add_row(str(late.rank), str(late.times), share, *times, shorten(late.worst, LONGEST_NAME))
    return table


def _hidden(summary: Summary) -> Table:
    table = new_table("overlap", ["rank"], ["communication", "hidden", "share"])
    for each in summary.overlaps:
        times = [as_time(value / 1e6) for value in (each.communication_us, each.hidden_us)]
        table.add_row(str(each.rank), *times, f"{each.share:.0%}")
    return table


def _notes(summary: Summary) -> list[str]:
    notes = [
        f"{len(summary.ranks)} ranks, {as_time(summary.duration_us / 1e6)}.",
        "total, median: without the time for the other ranks, which is `waiting` (hvd: the negotiation).",
        "hidden: communication during which the program did not wait for it.",
    ]
    if summary.clock_error_us:
        notes.append(f"Clocks of different hosts may differ by {as_time(summary.clock_error_us / 1e6)}.")
    if summary.lost:
        notes.append(f"{summary.lost} notes were lost: more came than were kept until they could be written.")
    return notes
