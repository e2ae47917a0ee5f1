"""Draw the pictures of benchmarks/ again from their tables, after the way of drawing has changed.

    python scripts/bench/redraw.py                      # those below
    python scripts/bench/redraw.py all_reduce-4 step-2

Curves over the course of a training are in no table: of strategies the ends are drawn.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs_site"))
from measurements import FOLDER, Measurement, Table, parse

from mpisgd.tools.bench.report.plots import colours_and_styles, need_matplotlib, plot

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SPREAD, PEAKS = ("median", "min", "max"), ("peak", "min", "max")
COLLECTIVES = ("all_reduce-1x1", "all_reduce-2", "all_reduce-2x2", "all_reduce-4", "collectives-2", "tuned-2")
NAMES = (*COLLECTIVES, "memory-2", "scaling-2", "step-2", "strategies-2x2", "strategies-text")


def number(cell: str) -> float:
    """The number of a cell such as `1.2 ms`, `64 KiB`, `97.86%` or `1,234`."""
    value, _, unit = cell.replace(",", "").rstrip("%").partition(" ")
    return float(value) * UNITS.get(unit, 1.0)


def cells(table: Table) -> list[dict[str, str]]:
    """The rows of a table by its headings."""
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def spread(row: Mapping[str, str]) -> dict[str, float]:
    """Median and range of a row, in seconds, or in bytes."""
    if "peak" in row:
        return {f"{which}_bytes": number(row[column]) for which, column in zip(SPREAD, PEAKS, strict=True)}
    return {f"{which}_s": number(row[which]) for which in SPREAD}


def record(name: str, found: Measurement) -> dict[str, Any]:
    """What the command had measured, as far as its picture needs it."""
    about = f"{found.all_of('ranks')[0]}, {found.all_of('machine')[0]}, {found.all_of('versions')[0]}"
    rows: list[dict[str, Any]] = []
    kind = "collectives" if name in COLLECTIVES else name.partition("-")[0]
    for table in found.tables:
        for row in cells(table):
            own: dict[str, Any] = {"variant": row["variant"], **spread(row)}
            if kind == "collectives":
                collective, dtype = table.title.split(", ")
                own |= {"collective": collective, "dtype": dtype, "bytes": int(number(row["size"]))}
            elif kind == "scaling":
                own |= {"model": table.title.split(", ")[1], "batch": int(row["batch"])}
                own |= {"examples_per_s": number(row["examples per s"])}
                alone = number(cells(table)[0]["examples per s"])  # one rank without communication
                own |= {"speed_up": own["examples_per_s"] / alone}
            elif kind == "memory":
                own |= {"training": row["training"], "ratio_to_none": number(row["x none"])}
            else:
                own |= {"model": row["model"], "ratio_to_no_communication": number(row["x none"])}
                own |= {"communicates": not re.match("none|one process", row["variant"])}
            rows.append(own)
    for row in rows if kind == "step" else ():  # exactly the multiples of the table
        base = next(other["median_s"] for other in rows if other["model"] == row["model"])
        row["median_s"] = row["ratio_to_no_communication"] * base
    return {"kind": kind, "title": f"{kind}: {about}", "rows": rows}


def draw_totals(path: Path, found: Measurement) -> None:
    """Time and bytes of a whole training by each method, with the accuracy that it has reached."""
    need_matplotlib()
    from matplotlib import pyplot

    rows = cells(found.tables[0])[::-1]
    names = [row["variant"] for row in rows]
    colours = [colour for colour, _ in colours_and_styles(names).values()]
    labels = [re.sub(r"outer_options=.*", "...)", name) for name in names]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained", sharey=True)
    for ax, column, what in (
        (left, "time", "seconds"),
        (right, "MiB sent by hosts", "MiB sent by the hosts"),
    ):
        values = [number(row[column]) for row in rows]
        ax.barh(labels, values, color=colours)
        ax.set(xscale="log", xlabel=f"{what}, logarithmic (shorter is better)")
        ax.set_xlim(min(values) / 2, 6 * max(values))
        for place, (row, value) in enumerate(zip(rows, values, strict=True)):
            ax.text(1.05 * value, place, f"{value:g}, {row['test accuracy']}", va="center", fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"one training of 40 epochs, and its test accuracy; {found.all_of('ranks')[0]}", fontsize=10
    )
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def draw_losses(path: Path, found: Measurement) -> None:
    """Validation loss at the end, to that of the worst seed, and time of each method, by section."""
    need_matplotlib()
    from matplotlib import pyplot

    rows = cells(found.tables[0])[::-1]
    colours = [colour for colour, _ in colours_and_styles(row["variant"] for row in rows).values()]
    labels = [re.sub(r", outer_options={.*?}|, betas=\(.*?\)", "", row["variant"]) for row in rows]
    labels = ["\nwith ".join(label.split(" with ")) for label in labels]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 5.6), layout="constrained", sharey=True, width_ratios=(3, 2)
    )
    for place, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        loss, worst = number(row["validation loss"]), number(row["worst seed"])
        left.plot([loss, worst], [place, place], color=colour, linewidth=2)
        left.plot(loss, place, "o", color=colour, markersize=8)
        left.text(worst + 0.003, place, f"{loss:.4f}", va="center", fontsize=8)
        right.barh(place, number(row["time"]), color=colour)
        right.text(number(row["time"]) + 1, place, row["time"], va="center", fontsize=8)
    left.set(xlabel="validation loss: mean and worst seed")
    left.set_yticks(range(len(rows)), labels, fontsize=8)
    left.margins(x=0.12)
    right.margins(x=0.15)
    right.set(xlabel="seconds for 1,600 steps")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"a small GPT on text; {found.all_of('ranks')[0]}", fontsize=10)
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def main() -> None:
    """Draw the pictures that are named, or all."""
    for name in sys.argv[1:] or NAMES:
        found = parse((FOLDER / f"{name}.md").read_text())
        path = FOLDER / f"{name}.png"
        if name == "strategies-text":
            draw_losses(path, found)
        elif name.startswith("strategies"):
            draw_totals(path, found)
        else:
            need_matplotlib()
            plot(path, record(name, found))
        print(path.relative_to(FOLDER.parent))


if __name__ == "__main__":
    main()
