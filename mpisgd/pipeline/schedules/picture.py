"""Timelines as a picture: one panel each, one row per rank, one box per action."""

from pathlib import Path
from typing import TYPE_CHECKING

from mpisgd.errors import JobError
from mpisgd.pipeline.schedules.action import Kind
from mpisgd.pipeline.schedules.timeline import PipelineTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

COLOURS = {Kind.FORWARD: "#3d6fb4", Kind.BACKWARD: "#0b6e4f", Kind.UPDATE: "#d99a2b"}
LABELS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update"}
MOST_LABELLED = 400  # boxes; more are too small for a number


def draw(path: str | Path, *timelines: PipelineTimeline) -> None:
    """Draw timelines below each other into a file, in a format of matplotlib.

    Raises:
        JobError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as exc:
        raise JobError('a picture of a pipeline needs matplotlib: pip install "mpisgd[bench]"') from exc
    heights = [0.5 * len(timeline.spans) + 1.0 for timeline in timelines]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    panels = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, timeline in zip(panels, timelines, strict=True):
        _draw_panel(axes, timeline)
    patches = [Patch(color=colour, label=LABELS[kind]) for kind, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(path)


def _draw_panel(axes: "Axes", timeline: PipelineTimeline) -> None:
    spans = [(rank, span) for rank, own in enumerate(timeline.spans) for span in own]
    boxes = [(rank, span) for rank, span in spans if span.action.kind in COLOURS and span.end > span.begin]
    for rank, span in boxes:
        begin, length = span.begin - timeline.begin, span.end - span.begin
        colour = COLOURS[span.action.kind]
        # Stages of one rank differ in depth of colour.
        alpha = 1.0 - 0.3 * (span.action.stage // len(timeline.spans) % 3)
        axes.barh(rank, length, 0.86, begin, color=colour, alpha=alpha, edgecolor="white", linewidth=0.6)
        if span.action.kind.is_compute and len(boxes) <= MOST_LABELLED:
            text = str(span.action.micro_batch)
            axes.text(begin + length / 2, rank, text, ha="center", va="center", color="white", fontsize=7)
    axes.set_yticks(range(len(timeline.spans)), [f"rank {rank}" for rank in range(len(timeline.spans))])
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.duration)
    axes.set_title(f"{timeline.title}: idle {100 * timeline.idle_share:.1f} %", fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
