"""The matrix as a table for a terminal, and as a picture."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from mpisgd.tools.verification.cell import Cell
from mpisgd.tools.verification.sabotage import Sabotage

__all__ = ["draw", "summary_of", "table_of"]

SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "shared memory": "", "messages": "messages"}
USUAL = ("float64", "float32")
NO_CELL = "not compared: the mode has no such ranks or dtype"  # grey in the picture
LEAST = 1e-3  # of the tolerance: what is nearer is drawn alike


def table_of(cells: Sequence[Cell]) -> Table:
    """Return a row for each mode, and a column for each number of ranks and each transport."""
    columns = list(dict.fromkeys(map(_place, cells)))
    table = Table(title=_title(cells), title_justify="left")
    table.add_column("mode", overflow="fold")
    for column in columns:
        table.add_column(_heading(cells, column), justify="right", no_wrap=True)
    found: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.family, cell.mode, _place(cell)), []).append(cell)
    families = list(dict.fromkeys(cell.family for cell in cells))
    rows = dict.fromkeys((cell.family, cell.mode) for cell in cells)
    family = ""
    for row in sorted(rows, key=lambda row: families.index(row[0])):
        if row[0] != family:
            family = row[0]
            table.add_section()
            table.add_row(Text(family, style="bold"))
        texts = [_text(found.get((*row, column), [])) for column in columns]
        table.add_row(f"  {row[1]}", *texts)
    return table


def _title(cells: Sequence[Cell]) -> str:
    if any(cell.sabotage != Sabotage.NONE.value for cell in cells):
        return "largest difference of modes that are broken on purpose: each must be found"
    return "largest difference from one process, or from the definition"


def _place(cell: Cell) -> str:
    """Return the heading of a cell's column of the table, without dtypes."""
    ranks = f"{cell.ranks} rank{'s' * (cell.ranks > 1)}"
    transport = SHORT.get(cell.transport, cell.transport).replace(", ", "\n")
    return "\n".join(filter(None, (ranks, transport)))


def _heading(cells: Sequence[Cell], place: str) -> str:
    """Return that of a column, with the usual dtypes of its numbers."""
    dtypes = dict.fromkeys(cell.dtype for cell in cells if _place(cell) == place)
    return f"{place}\n{' '.join(SHORT[dtype] for dtype in dtypes if dtype in USUAL)}"


def _column(cell: Cell) -> str:
    """Return that of a column of the picture."""
    broken = "" if cell.sabotage == Sabotage.NONE.value else "\n".join(cell.sabotage.split())
    return f"{_place(cell)}\n{broken or SHORT[cell.dtype]}"


def _text(cells: Sequence[Cell]) -> Text:
    """Return the text of a cell: a number for each dtype, or the sabotages that were found."""
    if any(cell.sabotage != Sabotage.NONE.value for cell in cells):
        return _sabotages(cells)
    return Text(" ").join(map(_number, cells))


def _number(cell: Cell) -> Text:
    number = "failed" if math.isinf(cell.difference) else f"{cell.difference:.0e}"
    shown = f"{number} bf16" if cell.dtype == "bfloat16" else number
    if cell.is_as_wanted:
        return Text(shown, style="green")
    return Text(f"{'CANNOT TELL' if cell.undecided else 'WRONG'} {shown}", style="bold red")


def _sabotages(cells: Sequence[Cell]) -> Text:
    missed = [cell.sabotage for cell in cells if not cell.is_as_wanted]
    if missed:
        return Text(f"MISSED {', '.join(missed)}", style="bold red")
    idle = sum(not cell.counts for cell in cells)
    without = f", {idle} no effect" if idle else ""
    return Text(f"{len(cells) - idle} found{without}", style="green")


def summary_of(cells: Sequence[Cell]) -> list[str]:
    """Return how many cells are as they must be, and a line for each that is not."""
    wrong = [cell for cell in cells if not cell.is_as_wanted]
    lines = [
        f"{cell.mode}, {cell.ranks} ranks, {cell.transport}, {cell.dtype}, {_what(cell)}" for cell in wrong
    ]
    counted = sum(cell.counts for cell in cells)
    idle = len(cells) - counted
    uncounted = f"; {idle} are not counted, where what is broken changes nothing" if idle else ""
    return [*lines, f"{counted - len(wrong)} of {counted} cells are as they must be{uncounted}"]


def _what(cell: Cell) -> str:
    if math.isinf(cell.difference):
        return cell.reason
    if cell.undecided and cell.sabotage == Sabotage.NONE.value:
        return f"cannot tell, from step {cell.step} on: off by {cell.difference:.1e}, {cell.reason}"
    if cell.sabotage != Sabotage.NONE.value:
        return f"{cell.sabotage}: not noticed, the difference is {cell.difference:.1e}"
    return (
        f"from step {cell.step} on: off by {cell.difference:.1e}, allowed are {cell.tolerance:.1e} "
        f"({cell.reason})"
    )


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Save a picture of the matrix: how far each cell is from its tolerance.

    Pairs of a strategy and a compressor have a row for each kind of strategy, with the farthest of them.
    """
    rows = list(dict.fromkeys(_row(cell) for cell in cells))
    columns = list(dict.fromkeys(map(_column, cells)))
    values = [[math.nan] * len(columns) for _ in rows]
    for cell in cells:
        row, column = values[rows.index(_row(cell))], columns.index(_column(cell))
        row[column] = max([_closeness(cell), row[column]], key=lambda value: (not math.isnan(value), value))
    draw_decades(values, rows, [column.replace("\n", ", ") for column in columns], _title(cells), path)


def draw_decades(
    values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], title: str, path: Path
) -> None:
    """Save a picture of decades between differences and tolerances, legible at the width of a page."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(
        figsize=(4.5 + 0.28 * len(columns), 2.6 + 0.2 * len(rows)), layout="constrained"
    )
    image = axes.imshow(values, aspect="auto", cmap="RdYlGn_r", vmin=-3, vmax=3)
    axes.set_facecolor("0.9")  # shines through where there is no value
    axes.set_xticks(range(len(columns)), columns, fontsize=9, rotation=90)
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    figure.suptitle(title, fontsize=11)
    bar: Any = figure.colorbar(
        image, ticks=[-3, 0, 3], location="bottom", shrink=0.6, aspect=40, fraction=0.03, pad=0.01
    )
    bar.ax.set_xticklabels(["a thousandth", "the tolerance", "a thousandfold"], fontsize=9)
    missing = [Patch(facecolor="0.9", edgecolor="0.6", label=NO_CELL)]
    figure.legend(handles=missing, loc="outside lower center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def _row(cell: Cell) -> str:
    pair = re.fullmatch(r"(\w+)\(.*\), (compress|Compression)\..*", cell.mode)
    return cell.mode if pair is None else f"{pair[1]}, by itself and with each compressor"


def _closeness(cell: Cell) -> float:
    """Return the decades between difference and tolerance, within three."""
    if not cell.counts:
        return math.nan
    if math.isinf(cell.difference):
        return -math.log10(LEAST)
    if not cell.tolerance:  # bit for bit
        return math.log10(LEAST) if not cell.difference else -math.log10(LEAST)
    ratio = max(LEAST, min(1 / LEAST, cell.difference / cell.tolerance))
    return math.log10(ratio)
