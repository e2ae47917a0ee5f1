"""Pictures of a plan: throughput over ranks by method, and the timeline of a step."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpisgd.tools.bench.report.plots import COLOURS, colours_and_styles, need_matplotlib
from mpisgd.tools.bench.report.rows import as_time
from mpisgd.tools.plan.prediction import Prediction
from mpisgd.tools.plan.simulation.engine import Task
from mpisgd.tools.plan.steps.graph import COMMUNICATION, COMPUTE
from mpisgd.tools.plan.steps.pipeline_step import MESSAGES

__all__ = ["draw_throughput", "draw_timelines"]

STYLES = ("-", "--", ":")
MOST_TIMELINES, MOST_LINES, TITLE_CHARACTERS = 6, 16, 80
# In the order of the legend.
TASK_COLOURS = {
    "forward": COLOURS[2],
    "backward": COLOURS[0],
    "forward, backward": "#1d6f8c",
    "optimizer": COLOURS[4],
    "all_reduce": COLOURS[1],
    "all_gather": COLOURS[3],
    "reduce_scatter": COLOURS[7],
    "exchange": "#e3a396",
    "send": COLOURS[6],
    "compress": "#7f7f00",
    "check": COLOURS[5],
    "other": "#b9c0c5",
}


def draw_throughput(path: Path, predictions: Sequence[Prediction], title: Sequence[str]) -> None:
    """Write examples per second of a rank over ranks: a line for each method, and without communication.

    Args:
        path: of the picture, a PNG.
        predictions: the best first.
        title: its lines.

    Raises:
        JobError: there is no matplotlib.
    """
    need_matplotlib()
    from matplotlib import pyplot

    figure, ax = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    # Sorted as the predictions are, the best first.
    methods = list(dict.fromkeys(each.method for each in predictions))[:MOST_LINES]
    for method, (colour, number) in colours_and_styles(methods).items():
        here = sorted((e.cluster.size, _per_rank(e)) for e in predictions if e.method == method)
        x, y = zip(*here, strict=True)
        ax.plot(x, y, STYLES[number], marker="o", markersize=4, color=colour, label=method)
    sizes = sorted({each.cluster.size for each in predictions})
    alone = [max(_alone(each) for each in predictions if each.cluster.size == size) for size in sizes]
    ax.plot(sizes, alone, "--", color="black", linewidth=1, label="no communication", zorder=1)
    ax.set(xscale="log", xlabel="ranks", ylabel="examples per second of a rank")
    ax.set_title(_wrapped(title), fontsize=10)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _per_rank(prediction: Prediction) -> float:
    return prediction.examples_per_s / prediction.cluster.size


def _alone(prediction: Prediction) -> float:
    profile = prediction.profile
    return profile.batch / (profile.compute_s + profile.optimizer_s)


def draw_timelines(path: Path, predictions: Sequence[Prediction], title: Sequence[str]) -> None:
    """Write what the program and the queue of a rank do in one step: the first few methods at their best.

    Of strategies that meet every few steps, it is a step in which they do.

    Args:
        path: of the picture, a PNG.
        predictions: the best first.
        title: its lines.

    Raises:
        JobError: there is no matplotlib.
    """
    need_matplotlib()
    from matplotlib import pyplot

    best_of = {each.method: each for each in reversed(predictions)}
    shown = sorted(best_of.values(), key=predictions.index)[:MOST_TIMELINES]
    size = (9, 1.3 * len(shown) + 1.2)
    figure, grid = pyplot.subplots(
        len(shown), 1, figsize=size, squeeze=False, layout="constrained", sharex=True
    )
    for ax, prediction in zip(grid[:, 0], shown, strict=True):
        _draw_step(ax, prediction)
    grid[-1, 0].set_xlabel("milliseconds")
    handles = {
        name: bar for ax in grid[:, 0] for bar, name in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    names = [name for name in TASK_COLOURS if name in handles]
    bars = [handles[name] for name in names]
    figure.legend(bars, names, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.suptitle(_wrapped(title), fontsize=10)
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _wrapped(title: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(line, TITLE_CHARACTERS) for line in title)


def _draw_step(ax: Any, prediction: Prediction) -> None:
    step = prediction.step
    both = zip(step.tasks, step.spans, strict=True)
    bars = [(task, span) for task, span in both if span.end_s > span.start_s]
    tracks = _tracks(step.tasks)
    for name in sorted({_label(task.name) for task, _ in bars}):
        found = [(task, span) for task, span in bars if _label(task.name) == name]
        places = [tracks.index(task.track) for task, _ in found]
        starts = [span.start_s * 1e3 for _, span in found]
        widths = [(span.end_s - span.start_s) * 1e3 for _, span in found]
        ax.barh(
            places,
            widths,
            left=starts,
            height=0.8,
            color=TASK_COLOURS[name],
            edgecolor="white",
            linewidth=0.3,
            label=name,
        )
    ax.set_yticks(range(len(tracks)), tracks, fontsize=8)
    ax.invert_yaxis()
    text = f"{prediction.method}, {prediction.cluster.size} ranks: {as_time(prediction.step_s)} on average"
    ax.set_title(text, fontsize=9, loc="left")


def _tracks(tasks: Sequence[Task]) -> list[str]:
    """Return the rows: the program and its queue, or the stages of a pipeline and their messages."""
    found = list(dict.fromkeys(task.track for task in tasks))
    if COMPUTE in found:
        return [COMPUTE, COMMUNICATION]
    stages = sorted((track for track in found if track != MESSAGES), key=lambda track: int(track.split()[1]))
    return [*stages, MESSAGES]


def _label(name: str) -> str:
    known = name.split()[0]
    return known if known in TASK_COLOURS else name if name in TASK_COLOURS else "other"
