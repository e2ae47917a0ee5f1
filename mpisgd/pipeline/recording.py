"""What a pipeline has done, measured: the actions of all ranks by one clock, beside the ideal timeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.pipeline.schedules.action import Action, Kind
from mpisgd.pipeline.schedules.picture import draw
from mpisgd.pipeline.schedules.plan import Plan
from mpisgd.pipeline.schedules.simulation import Costs
from mpisgd.pipeline.schedules.timeline import PipelineTimeline, Span
from mpisgd.pipeline.worker import Recorded
from mpisgd.timeline.clock import Clock, align

__all__ = ["Recording", "gather_recording"]


@dataclass(frozen=True)
class Recording:
    """A recording of some steps of a pipeline, beside the ideal timeline.

    Attributes:
        measured: measured times, in seconds since the first action.
        ideal: the same actions with the mean time of their stage, and messages that take no time.
    """

    measured: PipelineTimeline
    ideal: PipelineTimeline

    def draw(self, path: str | Path) -> None:
        """Draw both below each other into a file in a format of matplotlib, which is needed."""
        draw(path, self.measured, self.ideal)

    def __str__(self) -> str:
        lines = ["           idle, measured   ideal"]
        ranks = range(len(self.measured.spans))
        shares = [(f"rank {r}", self.measured.idle_share_of(r), self.ideal.idle_share_of(r)) for r in ranks]
        shares.append(("all ranks", self.measured.idle_share, self.ideal.idle_share))
        lines += [f"{name:9}  {100 * mine:12.1f} %  {100 * ideal:5.1f} %" for name, mine, ideal in shares]
        lines.append(f"duration   {self.measured.duration:12.4f} s  {self.ideal.duration:.4f} s")
        return "\n".join(lines)


def gather_recording(recorded: Sequence[Recorded], plan: Plan, group: Group) -> Recording:
    """Return the recording of all ranks. Collective.

    Args:
        recorded: on this rank.
        plan: what has been recorded.
        group: of the pipeline.
    """
    clocks: list[Clock] = []
    queue = group.queue
    queue.run(Operation("pipeline recording"), lambda: clocks.append(align(queue.communicator)))
    mine = [
        Span(action, clocks[0].to_us(each.begin_ns) / 1e6, clocks[0].to_us(each.end_ns) / 1e6)
        for action, each in zip(_numbered(recorded, plan, group.rank), recorded, strict=True)
    ]
    everyones: list[Sequence[Span]] = [()] * group.size
    all_gather_object(everyones, mine, group)
    measured = PipelineTimeline(tuple(map(tuple, everyones)), f"{plan.name}, measured")
    num_stages = plan.shape.num_stages
    forward, backward, update = (
        measured.mean_costs(kind, num_stages) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
    )
    ideal = plan.timeline(Costs(forward, backward, update))
    return Recording(measured, PipelineTimeline(ideal.spans, f"{plan.name}, ideal"))


def _numbered(recorded: Sequence[Recorded], plan: Plan, rank: int) -> Sequence[Action]:
    """Return the recorded actions, numbered as in the plan: a flushing pipeline counts each step anew."""
    planned = plan.actions[rank]
    return planned if len(planned) == len(recorded) else [each.action for each in recorded]
