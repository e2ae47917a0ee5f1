"""Measured rows as tables for a terminal."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from mpisgd.bench.report.rows import as_bytes, as_time

__all__ = ["new_table", "one_line", "show", "tables_of", "timed_table"]

WIDTH = 116
Row = dict[str, Any]


class Column(NamedTuple):
    """A column of numbers: what stands above it, and what it says of a row."""

    heading: str
    text: Callable[[Row], str]


def _number(heading: str, field: str, form: str = ".2f") -> Column:
    """Return the column of a field, which is empty where the field is None."""
    return Column(heading, lambda row: "" if row[field] is None else format(row[field], form))


def _time(which: str) -> Column:
    return Column(which, lambda row: as_time(row[f"{which}_s"]))


def _memory(heading: str, which: str) -> Column:
    return Column(heading, lambda row: as_bytes(row[f"{which}_bytes"]))


TIMES = (_time("median"), _time("min"), _time("max"))
EXAMPLES = _number("examples/s", "examples_per_s", ".0f")


class Layout(NamedTuple):
    """One table of a record.

    Attributes:
        title: above it.
        section: the field whose values are told once for all rows that share it.
        columns: what stands beside the variants.
    """

    title: str
    section: str
    columns: Sequence[Column]


# By the kind of record; of collectives there is a table for each.
LAYOUTS = {
    "step": Layout(
        "training step",
        "model",
        [*TIMES, EXAMPLES, _number("x no communication", "ratio_to_no_communication")],
    ),
    "scaling": Layout(
        "scaling",
        "model",
        [
            _number("ranks", "ranks", "d"),
            *TIMES,
            EXAMPLES,
            _number("speed-up", "speed_up"),
            _number("efficiency", "efficiency", ".0%"),
        ],
    ),
    "overlap": Layout(
        "a training step between hosts",
        "model",
        [
            *TIMES,
            _number("x limit", "ratio_to_link"),
            _number("x max", "ratio_to_larger"),
            _number("x bound", "ratio_to_bound"),
        ],
    ),
    "checks": Layout(
        "checks",
        "model",
        [
            *TIMES,
            _number("x unchecked", "ratio_to_bare"),
            _number("operations", "operations", "d"),
            _number("checks alone", "part_of_step", ".2%"),
        ],
    ),
    "memory": Layout(
        "memory of the host, all ranks together",
        "training",
        [
            _memory("peak", "median"),
            _memory("min", "min"),
            _memory("max", "max"),
            _number("x none", "ratio_to_none"),
            Column("more per rank", lambda row: f"{row['extra_bytes_per_rank'] / 2**20:.1f} MiB"),
            _number("x allowed", "ratio_to_allowed"),
        ],
    ),
}


def tables_of(kind: str, rows: Iterable[Row]) -> list[Table]:
    """Return the tables of a record of this kind."""
    if kind != "collectives":
        return [_table(LAYOUTS[kind], rows)]
    groups = groupby(rows, lambda row: (row["collective"], row["dtype"]))
    return [_collective_table(f"{name}, {dtype}", list(group)) for (name, dtype), group in groups]


def _collective_table(title: str, rows: Sequence[Row]) -> Table:
    """Return one table; with what a ping-pong says where one was played."""
    rates = (_number("GB/s", "algbw_gb_s", ".3g"), _number("bus GB/s", "busbw_gb_s", ".3g"))
    columns = [*TIMES, *rates, _number("x limit", "ratio_to_limit")]
    if any(row["ratio_to_ping_pong"] for row in rows):
        columns.append(_number("x ping-pong", "ratio_to_ping_pong"))
    sized = [{**row, "size": as_bytes(row["bytes"])} for row in rows]
    return _table(Layout(title, "size", columns), sized)


def timed_table(title: str, section: str, rows: Iterable[Row], field: str, heading: str) -> Table:
    """Return a table of `timed_rows`, and of what one of their fields compares them with."""
    return _table(Layout(title, section, [*TIMES, _number(heading, field)]), rows)


def _table(layout: Layout, rows: Iterable[Row]) -> Table:
    """Return a table in sections, whose value stands in the first row of each."""
    headings = [column.heading for column in layout.columns]
    table = new_table(layout.title, [layout.section, "variant"], headings)
    for value, section in groupby(rows, lambda row: row[layout.section]):
        for place, row in enumerate(section):
            cells = [column.text(row) for column in layout.columns]
            table.add_row("" if place else str(value), row["variant"], *cells)
        table.add_section()
    return table


def new_table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """Return a table without rows, by the headings of its columns of words and of those of numbers."""
    table = Table(*words, title=title, title_justify="left")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def one_line(what: str, rows: Iterable[Row]) -> str:
    """Return the medians of one case, to be said as soon as they are known."""
    return f"{what}: " + ", ".join(f"{row['variant']} {_median(row)}" for row in rows)


def _median(row: Row) -> str:
    return as_time(row["median_s"]) if "median_s" in row else as_bytes(row["median_bytes"])


def show(tables: Sequence[Table], notes: Iterable[str]) -> None:
    """Print tables, and lines below them."""
    # Under mpirun stdout is no terminal of a true width, or a pipe: plain text that fits most screens.
    console = Console(width=WIDTH, force_terminal=False)
    for table in tables:
        console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
