"""Measured rows as PNG files."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpisgd.bench.report.rows import LIMIT, OURS, PING_PONG, SHARED, as_bytes, as_time
from mpisgd.errors import JobError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PLOTS", "need_matplotlib"]

Row = dict[str, Any]

NUM_COLUMNS = 4
# Ours stand out, and a variant has the same colour in every panel.
COLOURS = ("#0b6e4f", "#c8553d", "#3d6fb4", "#8a5a9e", "#d99a2b", "#5f6b73", "#2aa7a1", "#a23b72")
GREY = "#4a4a4a"
BOUNDS = {LIMIT: "--", PING_PONG: ":"}


def need_matplotlib() -> None:
    """Raise JobError now rather than after the measurement where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError as exc:
        raise JobError('--plot needs matplotlib: pip install "mpisgd[bench]"') from exc
    matplotlib.use("agg")


def plot_collectives(path: Path, record: dict[str, Any]) -> None:
    """Draw time over size for each collective, the limit dashed."""
    variants = (row["variant"] for row in record["rows"])
    names = list(dict.fromkeys(name for name in variants if name not in BOUNDS))
    with _panels(path, record, "collective", "dtype") as panels:
        for ax, here in panels:
            for name in [*names, *BOUNDS]:
                _draw_line(ax, name, names, [row for row in here if row["variant"] == name])
            _label_sizes(ax, sorted({row["bytes"] for row in here}))
            ax.set(yscale="log", ylabel="microseconds (median, range)")
            ax.grid(alpha=0.25, which="major")


def _draw_line(ax: "Axes", name: str, names: Sequence[str], rows: Sequence[Row]) -> None:
    if not rows:
        return
    x = [row["bytes"] for row in rows]
    y, low, high = ([row[key] * 1e6 for row in rows] for key in ("median_s", "min_s", "max_s"))
    if name in BOUNDS:
        ax.plot(x, y, BOUNDS[name], color="black", linewidth=1.2, label=name, zorder=1)
        return
    colour = COLOURS[names.index(name) % len(COLOURS)]
    width = 2.2 if name == "mpisgd" else 1.4
    ax.plot(x, y, color=colour, linewidth=width, marker="o", markersize=3, label=name, zorder=2)
    ax.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)


def _label_sizes(ax: "Axes", sizes: Sequence[int]) -> None:
    step = max(1, -(-len(sizes) // 7))
    ticks = sizes[::step]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [as_bytes(nbytes) for nbytes in ticks], fontsize=7, rotation=30)
    ax.minorticks_off()


class Bars(NamedTuple):
    """What the bars of a record are multiples of.

    Attributes:
        panel: the field whose values have axes of their own.
        unit: of the fields `median_`, `min_` and `max_`.
        ratio: the field of the median's multiple.
        base: what that is a multiple of.
        as_text: writes it for people.
    """

    panel: str
    unit: str
    ratio: str
    base: str
    as_text: Callable[[Any], str] = as_time


BARS = {
    "step": Bars("model", "s", "ratio_to_no_communication", "no communication"),
    "overlap": Bars("model", "s", "ratio_to_larger", "larger of limit and compute"),
    "memory": Bars("training", "bytes", "ratio_to_none", "none", as_bytes),
}


def plot_bars(path: Path, record: dict[str, Any]) -> None:
    """Draw the median of each variant as a multiple of the base."""
    bars = BARS[record["kind"]]
    with _panels(path, record, bars.panel) as panels:
        for ax, here in panels:
            base = here[0][f"median_{bars.unit}"] / here[0][bars.ratio]
            ax.set(xlabel=f"x {bars.base}, {bars.as_text(base)} (median, range)")
            _draw_bars(ax, here, bars.unit, base)


def _draw_bars(ax: "Axes", rows: Sequence[Row], unit: str, base: float) -> None:
    """Draw a bar for each row, the first on top: its median over `base`, and its range."""
    rows = rows[::-1]
    middle, low, high = (
        [row[f"{which}_{unit}"] / base for row in rows] for which in ("median", "min", "max")
    )
    errors = [
        [max(0.0, value - least) for value, least in zip(middle, low, strict=True)],
        [max(0.0, most - value) for value, most in zip(middle, high, strict=True)],
    ]
    colours = [_bar_colour(row) for row in rows]
    ax.barh([row["variant"] for row in rows], middle, xerr=errors, color=colours, ecolor=GREY)
    ax.axvline(1.0, color="black", linestyle="--", linewidth=1.2)
    for place, value in enumerate(middle):
        ax.text(0.02, place, f"{value:.2f}", va="center", color="white", fontsize=8)
    ax.tick_params(axis="y", labelsize=7)


def _bar_colour(row: dict[str, Any]) -> str:
    if row["variant"] in (OURS, SHARED):
        return COLOURS[0]
    return COLOURS[2] if row.get("communicates") else COLOURS[5]


def plot_scaling(path: Path, record: dict[str, Any]) -> None:
    """Draw examples per second over ranks, log-log, with the line of perfect scaling."""
    from matplotlib.ticker import LogFormatter

    names = sorted({row["variant"] for row in record["rows"]}, key=lambda name: name != "mpisgd")
    with _panels(path, record, "model") as panels:
        for ax, here in panels:
            counts = sorted({row["ranks"] for row in here})
            for name, colour in zip(names, itertools.cycle(COLOURS), strict=False):
                mine = [row for row in here if row["variant"] == name]
                x, y = [row["ranks"] for row in mine], [row["examples_per_s"] for row in mine]
                ax.plot(x, y, marker="o", color=colour, label=name)
            first = max(row["examples_per_s"] / row["speed_up"] for row in here)
            perfect = [first * count for count in counts]
            ax.plot(counts, perfect, "--", color="black", label="perfect", zorder=1)
            ax.set_xscale("log", base=2)
            ax.set_xticks(counts, [str(count) for count in counts])
            ax.minorticks_off()
            ax.set(yscale="log", xlabel="ranks", ylabel="examples per second")
            ax.yaxis.set_major_formatter(LogFormatter())
            ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))  # as plain numbers


@contextlib.contextmanager
def _panels(path: Path, record: dict[str, Any], *fields: str) -> Iterator["list[tuple[Axes, list[Row]]]"]:
    """Yield axes for the rows of each value of `fields`, and write the file when they are drawn."""
    from matplotlib import pyplot

    panels: dict[str, list[Row]] = {}
    for row in record["rows"]:
        panels.setdefault(", ".join(row[field] for field in fields), []).append(row)
    columns = min(max(len(panels), 1), NUM_COLUMNS)
    num_rows = -(-len(panels) // columns) or 1
    figure, grid = pyplot.subplots(
        num_rows, columns, figsize=(5 * columns, 4 * num_rows + 0.6), squeeze=False, layout="constrained"
    )
    axes = list(grid.flat)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax, title in zip(axes, panels, strict=False):
        ax.set(title=title)
    figure.suptitle(record["title"], fontsize=10)
    yield list(zip(axes, panels.values(), strict=False))
    labelled = {
        label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    if labelled:
        figure.legend(
            list(labelled.values()), list(labelled), loc="outside lower center", ncols=6, frameon=False
        )
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


# By the kind of record.
PLOTS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "collectives": plot_collectives,
    "step": plot_bars,
    "scaling": plot_scaling,
    "memory": plot_bars,
    "overlap": plot_bars,
}
