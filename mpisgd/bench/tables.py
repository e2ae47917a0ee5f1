"""Measured rows as tables for a terminal."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from mpisgd.bench.summary import as_bytes, as_time

__all__ = ["collective_tables", "one_line", "scaling_table", "show", "step_table"]

WIDTH = 116


def collective_tables(rows: Iterable[dict[str, Any]]) -> list[Table]:
    """Return a table for each collective and dtype."""
    tables = []
    for (collective, dtype), group in groupby(rows, lambda row: (row["collective"], row["dtype"])):
        table = _table(f"{collective}, {dtype}", ["size"], *_times("GB/s", "bus GB/s", "x limit"))
        for nbytes, variants in groupby(group, lambda row: row["bytes"]):
            for place, row in enumerate(variants):
                size = as_bytes(nbytes) if place == 0 else ""
                rates = (_rate(row["algbw_gb_s"]), _rate(row["busbw_gb_s"]))
                table.add_row(size, row["variant"], *_spread(row), *rates, _ratio(row["ratio_to_limit"]))
            table.add_section()
        tables.append(table)
    return tables


def step_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Return one table for all models."""
    table = _table("training step", ["model"], *_times("examples/s", "x no communication"))
    for model, variants in groupby(rows, lambda row: row["model"]):
        for place, row in enumerate(variants):
            speed = f"{row['examples_per_s']:.0f}"
            relative = _ratio(row["ratio_to_no_communication"])
            table.add_row(model if place == 0 else "", row["variant"], *_spread(row), speed, relative)
        table.add_section()
    return table


def scaling_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Return the training steps of one variant after the other, over rank counts."""
    table = _table("scaling", ["model"], *_times("examples/s", "speed-up", "efficiency"))
    for row in rows:
        speed_up = f"{row['speed_up']:.2f}"
        efficiency = f"{row['efficiency']:.0%}"
        name = f"{row['variant']}, {row['ranks']} ranks" if row["ranks"] > 1 else f"{row['variant']}, 1 rank"
        table.add_row(row["model"], name, *_spread(row), f"{row['examples_per_s']:.0f}", speed_up, efficiency)
    return table


def one_line(what: str, rows: Iterable[dict[str, Any]]) -> str:
    """Return the medians of one case, to be said as soon as they are known."""
    return f"{what}: " + ", ".join(f"{row['variant']} {as_time(row['median_s'])}" for row in rows)


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


def _spread(row: dict[str, Any]) -> tuple[str, str, str]:
    return as_time(row["median_s"]), as_time(row["min_s"]), as_time(row["max_s"])


def _rate(value: float) -> str:
    return f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
