"""Measured rows as tables for a terminal."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table

from mpisgd.tools.bench.report.rows import as_bytes, as_text, as_time

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


def _ratio(heading: str, base: str) -> Column:
    """Return the column of what the median is a multiple of."""
    return _number(heading, f"ratio_to_{base}")


SPREAD = [Column(which, partial(as_text, which=which)) for which in ("median", "min", "max")]
EXAMPLES = _number("examples\nper s", "examples_per_s", ".0f")
RANKS = _number("ranks", "ranks", "d")
THREADS = _number("threads", "threads", "d")
ONE_PROCESS = _ratio("x one\nprocess", "one_process")
COLLECTIVE = [
    *SPREAD,
    _number("GB/s", "algbw_gb_s", ".3g"),
    _number("bus GB/s", "busbw_gb_s", ".3g"),
    _ratio("x limit", "limit"),
    _ratio("x ping-pong", "ping_pong"),
]


class TableFormat(NamedTuple):
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
FORMATS = {
    "step": TableFormat(
        "training step",
        "model",
        [THREADS, *SPREAD, EXAMPLES, _ratio("x none", "no_communication"), ONE_PROCESS],
    ),
    "scaling": TableFormat(
        "scaling",
        "batch",
        [RANKS, THREADS, *SPREAD, EXAMPLES, _number("efficiency", "efficiency", ".0%"), ONE_PROCESS],
    ),
    "layout": TableFormat(
        "ranks and threads: time for a batch of the program",
        "program",
        [
            *SPREAD,
            _number("batches\nper s", "batches_per_s", ".3g"),
            _ratio("x fastest", "fastest"),
            Column("a step", lambda row: as_time(row["step_s"])),
            _number("rounds", "rounds", "d"),
        ],
    ),
    "overlap": TableFormat(
        "a training step between hosts",
        "model",
        [*SPREAD, _ratio("x limit", "link"), _ratio("x max", "larger"), _ratio("x bound", "bound")],
    ),
    "checks": TableFormat(
        "checks",
        "model",
        [
            *SPREAD,
            _ratio("x unchecked", "bare"),
            _number("operations", "operations", "d"),
            _number("checks alone", "part_of_step", ".2%"),
        ],
    ),
    "strategies": TableFormat(
        "ways of training together: the digits, mean over seeds",
        "section",
        [
            _number("test\naccuracy", "accuracy", ".2%"),
            _number("worst\nseed", "accuracy_min", ".2%"),
            Column("time", lambda row: as_time(row["median_s"])),
            _number("x faster", "speed_up"),
            _number("MiB sent\nby hosts", "mib_sent", ".2f"),
        ],
    ),
    "strategies of text": TableFormat(
        "ways of training together: a GPT on text, mean over seeds",
        "section",
        [
            _number("validation\nloss", "loss", ".4f"),
            _number("worst\nseed", "loss_max", ".4f"),
            _number("x best\nsynchronous", "loss_ratio", ".4f"),
            _number("worst x\nof a seed", "loss_ratio_max", ".4f"),
            Column("seeds", lambda row: str(len(row["finals"]))),
            Column("time", lambda row: as_time(row["median_s"])),
            _number("MiB sent\nby hosts", "mib_sent", ".2f"),
            _number("x its\nbytes", "bytes_ratio", ".3f"),
        ],
    ),
    "compression": TableFormat(
        "a training step with strategies and compressions",
        "model",
        [
            *SPREAD,
            _number("x faster", "speed_up"),
            Column("predicted", lambda row: as_time(row["predicted_s"]) if row["predicted_s"] else ""),
            _number("MiB sent\nper step", "mib_sent", ".3g"),
            _number("x fewer\nbytes", "sent_ratio", ".3g"),
        ],
    ),
    "offload": TableFormat(
        "a training step with the optimizer's state in files",
        "model",
        [
            *SPREAD,
            _number("MiB moved\nper step", "mib_moved", ".0f"),
            _number("GB/s", "gb_s", ".2f"),
            _ratio("x bound", "bound"),
        ],
    ),
    "memory": TableFormat(
        "memory of the host, all ranks together",
        "training",
        [
            SPREAD[0]._replace(heading="peak"),
            *SPREAD[1:],
            _ratio("x none", "none"),
            Column("more\nper rank", lambda row: f"{row['extra_bytes_per_rank'] / 2**20:.1f} MiB"),
            _ratio("x bound", "bound"),
            _ratio("x allowed", "allowed"),
        ],
    ),
}


def tables_of(kind: str, rows: Iterable[Row]) -> list[Table]:
    """Return the tables of a record of this kind."""
    if kind == "scaling":
        models = groupby(rows, itemgetter("model"))
        return [_table(FORMATS[kind]._replace(title=f"scaling, {name}"), group) for name, group in models]
    if kind != "collectives":
        return [_table(FORMATS[kind], rows)]
    tables = []
    for (name, dtype), group in groupby(rows, lambda row: (row["collective"], row["dtype"])):
        sized = [{**row, "size": as_bytes(row["bytes"])} for row in group]
        played = any(row["ratio_to_ping_pong"] for row in sized)
        columns = COLLECTIVE if played else COLLECTIVE[:-1]
        tables.append(_table(TableFormat(f"{name}, {dtype}", "size", columns), sized))
    return tables


def timed_table(title: str, section: str, rows: Iterable[Row], field: str, heading: str) -> Table:
    """Return a table of `timed_rows`, and of what one of their fields compares them with."""
    return _table(TableFormat(title, section, [*SPREAD, _number(heading, field)]), rows)


def _table(shown: TableFormat, rows: Iterable[Row]) -> Table:
    """Return a table in sections, whose value stands in the first row of each."""
    headings = [column.heading for column in shown.columns]
    table = new_table(shown.title, [shown.section, "variant"], headings)
    for value, section in groupby(rows, lambda row: row[shown.section]):
        for place, row in enumerate(section):
            cells = [column.text(row) for column in shown.columns]
            table.add_row("" if place else str(value), row["variant"], *cells)
        table.add_section()
    return table


def new_table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """Return a table without rows, by the headings of its columns of words and of those of numbers."""
    table = Table(title=title, title_justify="left")
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def one_line(what: str, rows: Iterable[Row]) -> str:
    """Return the medians of one case, to be said as soon as they are known."""
    return f"{what}: " + ", ".join(f"{row['variant']} {as_text(row, 'median')}" for row in rows)


def show(
    tables: Sequence[Table], notes: Iterable[str], file: TextIO | None = None, width: int | None = WIDTH
) -> None:
    """Print tables, and lines below them; to stdout, or to `file`. Without a width: that of the terminal."""
    # Under mpirun stdout is no terminal of a true width, or a pipe: plain text that fits most screens.
    console = Console(width=width, force_terminal=False, file=file)
    for table in tables:
        console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
