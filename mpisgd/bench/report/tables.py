"""Measured rows as tables for a terminal."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from mpisgd.bench.report.rows import as_bytes, as_time

__all__ = [
    "checks_table",
    "collective_tables",
    "memory_table",
    "one_line",
    "overlap_table",
    "scaling_table",
    "show",
    "step_table",
    "timed_table",
]

WIDTH = 116
Row = dict[str, Any]


def collective_tables(rows: Iterable[Row]) -> list[Table]:
    """Return a table for each collective and dtype."""
    groups = groupby(rows, lambda row: (row["collective"], row["dtype"]))
    return [_collective_table(f"{name}, {dtype}", list(group)) for (name, dtype), group in groups]


def _collective_table(title: str, rows: Sequence[Row]) -> Table:
    """Return one table; with what a ping-pong says where one was played."""
    relative = {"ratio_to_limit": "x limit"}
    if any(row["ratio_to_ping_pong"] for row in rows):
        relative["ratio_to_ping_pong"] = "x ping-pong"
    table = _table(title, ["size"], *_times("GB/s", "bus GB/s", *relative.values()))

    def cells(row: Row) -> Iterator[str]:
        yield from (*_spread(row), _rate(row["algbw_gb_s"]), _rate(row["busbw_gb_s"]))
        yield from (_ratio(row[name]) for name in relative)

    return _fill(table, rows, "bytes", cells, as_bytes)


def step_table(rows: Iterable[Row]) -> Table:
    """Return one table for all models."""
    table = _table("training step", ["model"], *_times("examples/s", "x no communication"))

    def cells(row: Row) -> tuple[str, ...]:
        return *_spread(row), f"{row['examples_per_s']:.0f}", _ratio(row["ratio_to_no_communication"])

    return _fill(table, rows, "model", cells)


def scaling_table(rows: Iterable[Row]) -> Table:
    """Return the training steps of one variant after the other, over rank counts."""
    table = _table("scaling", ["model"], *_times("examples/s", "speed-up", "efficiency"))
    for row in rows:
        speed_up = f"{row['speed_up']:.2f}"
        efficiency = f"{row['efficiency']:.0%}"
        name = f"{row['variant']}, {row['ranks']} ranks" if row["ranks"] > 1 else f"{row['variant']}, 1 rank"
        table.add_row(row["model"], name, *_spread(row), f"{row['examples_per_s']:.0f}", speed_up, efficiency)
    return table


def overlap_table(rows: Iterable[Row]) -> Table:
    """Return the steps between hosts, and their parts."""
    relative = {"ratio_to_link": "x limit", "ratio_to_larger": "x max", "ratio_to_bound": "x bound"}
    return timed_table("a training step between hosts", "model", rows, relative)


def checks_table(rows: Iterable[Row]) -> Table:
    """Return the steps with and without checks, and what all checks of a step come to."""
    table = _table("checks", ["model"], *_times("x unchecked", "operations", "checks alone"))

    def cells(row: Row) -> tuple[str, ...]:
        part = "" if row["part_of_step"] is None else f"{row['part_of_step']:.2%}"
        return *_spread(row), _ratio(row["ratio_to_bare"]), str(row["operations"]), part

    return _fill(table, rows, "model", cells)


def timed_table(title: str, first: str, rows: Iterable[Row], relative: Mapping[str, str]) -> Table:
    """Return a table of times.

    Args:
        title: above it.
        first: the field that says what was timed.
        rows: of `timed_rows`.
        relative: fields that follow the times, and what stands above them.
    """
    table = _table(title, [first], *_times(*relative.values()))

    def cells(row: Row) -> tuple[str, ...]:
        return *_spread(row), *(_ratio(row[field]) for field in relative)

    return _fill(table, rows, first, cells)


def memory_table(rows: Iterable[Row]) -> Table:
    """Return the host's peaks."""
    numbers = ("peak", "min", "max", "x none", "more per rank", "x allowed")
    table = _table("memory of the host, all ranks together", ["training"], *numbers)

    def cells(row: Row) -> tuple[str, ...]:
        peaks = (as_bytes(row[f"{which}_bytes"]) for which in ("median", "min", "max"))
        more = f"{row['extra_bytes_per_rank'] / 2**20:.1f} MiB"
        return *peaks, _ratio(row["ratio_to_none"]), more, _ratio(row["ratio_to_allowed"])

    return _fill(table, rows, "training", cells)


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


def _times(*more: str) -> list[str]:
    return ["median", "min", "max", *more]


def _table(title: str, first: list[str], *numbers: str) -> Table:
    table = Table(*first, "variant", title=title, title_justify="left")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _fill(
    table: Table,
    rows: Iterable[Row],
    field: str,
    cells: Callable[[Row], Iterable[str]],
    label: Callable[[Any], str] = str,
) -> Table:
    """Add rows in sections, one for each value of a field, which stands in the first row of its section."""
    for value, section in groupby(rows, lambda row: row[field]):
        for place, row in enumerate(section):
            table.add_row(label(value) if place == 0 else "", row["variant"], *cells(row))
        table.add_section()
    return table


def _spread(row: Row) -> tuple[str, str, str]:
    return as_time(row["median_s"]), as_time(row["min_s"]), as_time(row["max_s"])


def _rate(value: float) -> str:
    return f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
