"""Measured rows as PNG files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpisgd.bench.report.rows import LIMIT, OURS, PING_PONG, SHARED, as_bytes, as_time
from mpisgd.errors import JobError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PLOTS", "need_matplotlib"]

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
    rows = record["rows"]
    panels = list(dict.fromkeys((row["collective"], row["dtype"]) for row in rows))
    names = list(dict.fromkeys(row["variant"] for row in rows if row["variant"] not in BOUNDS))
    figure, axes = _figure(len(panels), record)
    for ax, (collective, dtype) in zip(axes, panels, strict=False):
        here = [row for row in rows if (row["collective"], row["dtype"]) == (collective, dtype)]
        for name in [*names, *BOUNDS]:
            _draw_line(ax, name, names, [row for row in here if row["variant"] == name])
        _label_sizes(ax, sorted({row["bytes"] for row in here}))
        ax.set(title=f"{collective}, {dtype}", yscale="log", ylabel="microseconds (median, range)")
        ax.grid(alpha=0.25, which="major")
    _finish(figure, axes, path)


def _draw_line(ax: "Axes", name: str, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
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
    rows, bars = record["rows"], BARS[record["kind"]]
    names = list(dict.fromkeys(row[bars.panel] for row in rows))
    figure, axes = _figure(len(names), record)
    for ax, name in zip(axes, names, strict=False):
        here = [row for row in rows if row[bars.panel] == name]
        base = here[0][f"median_{bars.unit}"] / here[0][bars.ratio]
        ax.set(title=name, xlabel=f"x {bars.base}, {bars.as_text(base)} (median, range)")
        _draw_bars(ax, here, bars.unit, base)
    _finish(figure, axes, path, legend=False)


def _draw_bars(ax: "Axes", rows: Sequence[dict[str, Any]], unit: str, base: float) -> None:
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

    rows = record["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    names = sorted({row["variant"] for row in rows}, key=lambda name: name != "mpisgd")
    figure, axes = _figure(len(models), record)
    for ax, model in zip(axes, models, strict=False):
        here = [row for row in rows if row["model"] == model]
        counts = sorted({row["ranks"] for row in here})
        for name in names:
            mine = [row for row in here if row["variant"] == name]
            x, y = [row["ranks"] for row in mine], [row["examples_per_s"] for row in mine]
            ax.plot(x, y, marker="o", color=COLOURS[names.index(name) % len(COLOURS)], label=name)
        first = max(row["examples_per_s"] / row["speed_up"] for row in here)
        ax.plot(counts, [first * count for count in counts], "--", color="black", label="perfect", zorder=1)
        ax.set_xscale("log", base=2)
        ax.set_xticks(counts, [str(count) for count in counts])
        ax.minorticks_off()
        ax.set(title=model, yscale="log", xlabel="ranks", ylabel="examples per second")
        ax.yaxis.set_major_formatter(LogFormatter())
        ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))  # as plain numbers
    _finish(figure, axes, path)


def _figure(num_panels: int, record: dict[str, Any]) -> tuple["Figure", list["Axes"]]:
    from matplotlib import pyplot

    columns = min(max(num_panels, 1), NUM_COLUMNS)
    num_rows = -(-num_panels // columns) or 1
    figure, grid = pyplot.subplots(
        num_rows, columns, figsize=(5 * columns, 4 * num_rows + 0.6), squeeze=False, layout="constrained"
    )
    axes = list(grid.flat)
    for ax in axes[num_panels:]:
        ax.set_visible(False)
    figure.suptitle(record["title"], fontsize=10)
    return figure, axes


def _finish(figure: "Figure", axes: Sequence["Axes"], path: Path, *, legend: bool = True) -> None:
    from matplotlib import pyplot

    if legend:
        labelled = {
            label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
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
