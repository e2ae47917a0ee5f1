"""Measured rows as PNG files; a library or a method has the same colour in all of them."""

import itertools
import re
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpisgd.errors import JobError
from mpisgd.tools.bench.report.rows import AS_TEXT, LIMIT, OURS, PING_PONG, as_bytes, unit_of
from mpisgd.tools.bench.report.tables import FORMATS

__all__ = ["COLOURS", "GREY", "colour_of", "colours_and_styles", "need_matplotlib", "plot"]

# For what has none of its own, in this order.
COLOURS = ("#0b6e4f", "#c8553d", "#3d6fb4", "#8a5a9e", "#d99a2b", "#5f6b73", "#2aa7a1", "#a23b72")
GREY = "#4a4a4a"
NUM_STYLES = 3
# By the beginning of the name, or by what is added with +.
KNOWN = {
    "mpisgd": COLOURS[0],
    "one process, not kept": "#e3a396",
    "one process": COLOURS[1],
    "no communication": COLOURS[5],
    "gloo": COLOURS[2],
    "DDP on gloo": COLOURS[2],
    "horovod": COLOURS[3],
    "MPI": COLOURS[4],
    "nccl": COLOURS[6],
    "Synchronous": "#222222",
    "Overlap": "#a8a8a8",
    "LocalSGD": "#5fb292",
    "DiLoCo": COLOURS[1],
    "Gossip": COLOURS[2],
    "ElasticAveraging": COLOURS[3],
    "ParameterServer": "#6b4f2a",
    "Sharded": COLOURS[5],
    "FullyShard": COLOURS[7],
    "auto": "#b59ac6",
    "bf16": "#8fa3b5",
    "PowerSGD": COLOURS[6],
    "TopK": COLOURS[4],
    "DeepGradient": "#e0699f",
    "QSGD": "#17517a",
    "OneBit": "#7f7f00",
    "OneBitAdam": "#7f7f00",
}
OPTIMIZERS = re.compile(r"with (OneBit\w+|ZeroOne\w+)")


def colour_of(name: str) -> str | None:
    """Return the colour of a library, or of a method such as `Synchronous + PowerSGD(rank=4)`."""
    optimizer = OPTIMIZERS.search(name)
    if optimizer:
        return KNOWN.get(optimizer[1])
    added = re.search(r" \+ (\w+)", name)
    key = added[1] if added else name
    return KNOWN.get(key) or KNOWN.get(re.split(r"[(,]| with ", key)[0].strip())


def colours_and_styles(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Return a colour for each name, and a number that tells apart those of one colour."""
    names = list(dict.fromkeys(names))
    taken = {colour_of(name) for name in names}
    free = [colour for colour in COLOURS if colour not in taken] or list(COLOURS)
    found: dict[str, tuple[str, int]] = {}
    for name in names:
        colour = colour_of(name) or free[sum(not colour_of(other) for other in found) % len(free)]
        same = sum(other == colour for other, _ in found.values())
        found[name] = (colour, same % NUM_STYLES)
    return found


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Row = dict[str, Any]

NUM_COLUMNS, NUM_TICKS, TITLE_CHARACTERS = 2, 7, 65  # two panels fill the width of a page
NAME_CHARACTERS = 60  # in a legend
PANEL_SIZES = {"strategies of text": (8, 6)}  # inches, where names are long
STYLES = ("-", "--", ":")
BOUNDS = {LIMIT: "--", PING_PONG: ":"}
# What the bars of a record are multiples of: the field of a median's multiple, and of what.
BASES = {
    "step": ("ratio_to_no_communication", "no communication"),
    "layout": ("ratio_to_fastest", "fastest"),
    "overlap": ("ratio_to_larger", "larger of limit and compute"),
    "memory": ("ratio_to_none", "none"),
    "compression": ("ratio_to_none", "no communication"),
}


def need_matplotlib() -> None:
    """Raise JobError now rather than after the measurement where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError as exc:
        raise JobError('--plot needs matplotlib: pip install "mpisgd[bench]"') from exc
    matplotlib.use("agg")


def plot(path: Path, record: dict[str, Any]) -> None:
    """Draw a record, with axes for each value of its section, and write the file."""
    from matplotlib import pyplot

    kind, panels = record["kind"], _panels(record)
    special = {
        "collectives": _draw_times,
        "scaling": _draw_scaling,
        "strategies": _draw_accuracy,
        "strategies of text": _draw_loss,
    }
    draw = special.get(kind, _draw_bars)
    columns = min(max(len(panels), 1), NUM_COLUMNS)
    num_rows = -(-len(panels) // columns) or 1
    width, height = PANEL_SIZES.get(kind, (5, 4))
    size = (width * columns, height * num_rows + 0.6)
    figure, grid = pyplot.subplots(num_rows, columns, figsize=size, squeeze=False, layout="constrained")
    for ax, panel in itertools.zip_longest(grid.flat, panels):
        if panel is None:
            ax.set_visible(False)
        else:
            ax.set(title=panel)
            draw(ax, panels[panel], record)
    figure.suptitle(textwrap.fill(record["title"], TITLE_CHARACTERS * columns), fontsize=10)
    labels = [ax.get_legend_handles_labels() for ax in grid.flat if ax.get_legend() is None]
    lines = {name: line for handles, names in labels for line, name in zip(handles, names, strict=True)}
    if lines:
        add_legend(figure, lines)
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def add_legend(figure: "Figure", lines: dict[str, Any]) -> None:
    """Put a legend below the panels, in as many columns as fit into the width of the figure."""
    names = [textwrap.shorten(name, NAME_CHARACTERS, placeholder=" ...") for name in lines]
    for ncols in range(min(len(lines), 6), 0, -1):
        handles = list(lines.values())
        legend = figure.legend(
            handles, names, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9
        )
        figure.draw_without_rendering()
        if legend.get_window_extent().width <= figure.bbox.width or ncols == 1:
            return
        legend.remove()


def _panels(record: dict[str, Any]) -> dict[str, list[Row]]:
    """Return the rows of each panel, by its title."""
    kind = record["kind"]
    if kind == "strategies":
        titles = ["accuracy against time"]
        titles += ["accuracy against bytes sent"] * any(row["mib_sent"] for row in record["rows"])
        return dict.fromkeys(titles, record["rows"])
    fields_of = {"collectives": ("collective", "dtype"), "scaling": ("model",)}
    fields = fields_of[kind] if kind in fields_of else (FORMATS[kind].section,)
    panels: dict[str, list[Row]] = {}
    for row in record["rows"]:
        panels.setdefault(", ".join(row[field] for field in fields), []).append(row)
    return panels


def _draw_times(ax: "Axes", rows: Sequence[Row], record: dict[str, Any]) -> None:
    """Draw time over size for each variant of a collective, the limit dashed."""
    chosen = colours_and_styles(row["variant"] for row in record["rows"] if row["variant"] not in BOUNDS)
    colours = {name: colour for name, (colour, _) in chosen.items()}
    for name in [*colours, *BOUNDS]:
        here = [row for row in rows if row["variant"] == name]
        x = [row["bytes"] for row in here]
        y, low, high = ([row[key] * 1e6 for row in here] for key in ("median_s", "min_s", "max_s"))
        if here and name in BOUNDS:
            ax.plot(x, y, BOUNDS[name], color="black", linewidth=1.2, label=name, zorder=1)
        elif here:
            width = 2.2 if name == OURS else 1.4
            ax.plot(x, y, "o-", color=colours[name], linewidth=width, markersize=3, label=name, zorder=2)
            ax.fill_between(x, low, high, color=colours[name], alpha=0.12, linewidth=0)
    sizes = sorted({row["bytes"] for row in rows})
    ticks = sizes[:: max(1, -(-len(sizes) // NUM_TICKS))]
    _powers_of_two(ax, ticks, [as_bytes(nbytes) for nbytes in ticks], fontsize=7, rotation=30)
    ax.set(yscale="log", ylabel="microseconds (median, range)")
    ax.grid(alpha=0.25, which="major")


def _draw_accuracy(ax: "Axes", rows: Sequence[Row], record: dict[str, Any]) -> None:
    """Draw test accuracy over the seconds, or over the bytes, that a training has taken."""
    from matplotlib.ticker import LogLocator, NullFormatter

    in_bytes = "bytes" in ax.get_title()
    chosen = colours_and_styles(row["variant"] for row in rows)
    for row in rows:
        colour, number = chosen[row["variant"]]
        x = [point[1] / 2**20 if in_bytes else point[0] for point in row["curve"]]
        y = [100 * point[2] for point in row["curve"]]
        ax.plot(x, y, STYLES[number], marker=".", color=colour, label=row["variant"])
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    label = "MiB sent by all hosts" if in_bytes else "seconds of training"
    ax.set(xlabel=label, ylabel="test accuracy, %")
    ax.set_ylim(bottom=max(0, min(100 * point[2] for row in rows for point in row["curve"])))
    ax.grid(alpha=0.3)


def _draw_loss(ax: "Axes", rows: Sequence[Row], record: dict[str, Any]) -> None:
    """Draw validation loss over the steps of a training; what is synchronous is black."""
    chosen = colours_and_styles(row["variant"] for row in rows if not row["is_synchronous"])
    for row in rows:
        colour, number = chosen.get(row["variant"], ("black", 0))
        style, width = STYLES[number], 2.2 if row["is_synchronous"] else 1.2
        x, y = ([point[place] for point in row["curve"]] for place in (3, 2))
        ax.plot(x, y, style, marker=".", color=colour, linewidth=width, label=row["variant"])
    first = [row["curve"][0][2] for row in rows]
    ax.set_ylim(top=1.2 * statistics.median(first))  # what does not train shall not decide the scale
    ax.set(xlabel="steps", ylabel="validation loss of a byte, natural units")
    ax.legend(fontsize=7, loc="upper right")
    ax.grid(alpha=0.3)


def _powers_of_two(ax: "Axes", ticks: Sequence[int], labels: Sequence[str], **style: Any) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, labels, **style)
    ax.minorticks_off()


def _draw_bars(ax: "Axes", rows: Sequence[Row], record: dict[str, Any]) -> None:
    """Draw a bar for each row, the first on top: its median as a multiple of the base, and its range."""
    ratio, what = BASES[record["kind"]]
    unit = unit_of(rows[0])
    base = rows[0][f"median_{unit}"] / rows[0][ratio]
    rows = rows[::-1]
    middle, low, high = (
        [row[f"{which}_{unit}"] / base for row in rows] for which in ("median", "min", "max")
    )
    errors = [[a - b for a, b in zip(*pair, strict=True)] for pair in ((middle, low), (high, middle))]
    colours = [_bar_colour(row) for row in rows]
    ax.barh([row["variant"] for row in rows], middle, xerr=errors, color=colours, ecolor=GREY)
    ax.axvline(1.0, color="black", linestyle="--", linewidth=1.2)
    for place, value in enumerate(middle):
        edge = ax.get_yaxis_transform()
        ax.text(0.99, place, f"{value:.2f}", transform=edge, ha="right", va="center", fontsize=8)
    ax.set_xlim(right=1.15 * max(high, default=1.0))
    ax.tick_params(axis="y", labelsize=8)
    ax.set_xlabel(f"x {what}, {AS_TEXT[unit](base)} (median, range)", fontsize=9)


def _bar_colour(row: Row) -> str:
    """Return the colour of the library that communicates, of one process, or of none."""
    if row["variant"].startswith("none"):
        return COLOURS[5]
    if known := colour_of(row["variant"]):
        return known
    library = re.search(r"mpisgd|gloo|nccl", row["variant"])
    if library:
        return colour_of(library[0]) or COLOURS[2]
    return COLOURS[2] if row.get("communicates") else COLOURS[5]


def _draw_scaling(ax: "Axes", rows: Sequence[Row], record: dict[str, Any]) -> None:
    """Draw examples per second over the batch, log-log, with the line of perfect scaling."""
    from matplotlib.ticker import LogFormatter

    batches = sorted({row["batch"] for row in rows})
    names = sorted(dict.fromkeys(row["variant"] for row in record["rows"]), key=lambda name: name != OURS)
    for name, (colour, _) in colours_and_styles(names).items():
        here = [row for row in rows if row["variant"] == name]
        x, y = [row["batch"] for row in here], [row["examples_per_s"] for row in here]
        ax.plot(x, y, marker="o", color=colour, label=name)
    first = max(row["examples_per_s"] / row["speed_up"] for row in rows)
    perfect = [first * batch / batches[0] for batch in batches]
    ax.plot(batches, perfect, "--", color="black", label="perfect", zorder=1)
    _powers_of_two(ax, batches, [f"{batch}\n{batch // batches[0]}" for batch in batches])
    ax.set(yscale="log", xlabel="batch, ranks that share it", ylabel="examples per second")
    ax.yaxis.set_major_formatter(LogFormatter())
    ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))  # as plain numbers
