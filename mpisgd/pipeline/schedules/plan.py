"""`Plan`: what every rank of a pipeline does, as lists of actions; prints as a table, draws as a picture."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpisgd.pipeline.schedules.action import Action, Kind
from mpisgd.pipeline.schedules.picture import draw
from mpisgd.pipeline.schedules.shape import PipelineShape
from mpisgd.pipeline.schedules.simulation import Costs, simulate
from mpisgd.pipeline.schedules.table import table
from mpisgd.pipeline.schedules.timeline import PipelineTimeline

__all__ = ["Plan", "with_messages"]


@dataclass(frozen=True)
class Plan:
    """All actions of some steps of a pipeline, from an empty pipeline to an empty one.

    Attributes:
        name: name of the schedule.
        shape: shape of the pipeline.
        actions: the actions of each rank in order, including messages.
    """

    name: str
    shape: PipelineShape
    actions: tuple[tuple[Action, ...], ...]

    def timeline(self, costs: Costs | None = None) -> PipelineTimeline:
        """Return when each action happens; see `simulate`."""
        return PipelineTimeline(simulate(self.actions, self.shape, costs).spans, self.name)

    def bubble_share(self, costs: Costs | None = None) -> float:
        """Return the share of all ranks' time in which they wait.

        With p stages on p ranks and m micro-batches it is (p - 1) / (m + p - 1) for GPipe and 1F1B, and
        (p - 1) / (m v + p - 1) for interleaved 1F1B with v stages per rank.
        """
        return self.timeline(costs).idle_share

    def versions_held(self, stage: int) -> int:
        """Return the largest number of versions of a stage's weights that a rank keeps at a time."""
        held, most = {0}, 1
        for action in self._of_first_replica(stage):
            if action.kind is Kind.UPDATE:
                held = {version for version in {*held, action.version} if version >= action.keep_from}
                most = max(most, len(held))
        return most

    def activations_held(self, stage: int) -> int:
        """Return the largest number of micro-batches whose activations of a stage a rank keeps at a time."""
        held = most = 0
        for action in self._of_first_replica(stage):
            held += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
            most = max(most, held)
        return most

    def draw(self, path: str | Path, costs: Costs | None = None) -> None:
        """Draw the ideal timeline into a file in a format of matplotlib, which is needed."""
        draw(path, self.timeline(costs))

    def table(self, *, versions: bool = False) -> str:
        """Return the ideal timeline as text: one row per rank, one column per time slot.

        Args:
            versions: whether to show the version of the weights that is read, as in `F3v1`.
        """
        return table(self.timeline(), versions=versions)

    def __str__(self) -> str:
        shape, stages = self.shape, range(self.shape.num_stages)
        head = (
            f"{self.name}: {shape.num_stages} stages on {shape.num_ranks} ranks, {shape.num_micro_batches} "
            f"micro-batches, bubble {100 * self.bubble_share():.1f} %"
        )
        held = f"by stage: versions of weights held {' '.join(str(self.versions_held(s)) for s in stages)}"
        held += f", activations held {' '.join(str(self.activations_held(s)) for s in stages)}"
        return f"{head}\n{held}\n\n{self.table()}"

    def _of_first_replica(self, stage: int) -> Iterator[Action]:
        return (action for action in self.actions[self.shape.ranks[stage][0]] if action.stage == stage)


def with_messages(actions: Sequence[Action], rank: int, shape: PipelineShape) -> list[Action]:
    """Return a rank's actions with the messages that they need before them, and make after them."""
    return [each for action in actions for each in _expanded(action, rank, shape)]


def _expanded(action: Action, rank: int, shape: PipelineShape) -> list[Action]:
    if action.kind is Kind.FORWARD:
        recv, send = Kind.RECV_ACTIVATION, Kind.SEND_ACTIVATION
        before, after = shape.sources(action.stage), shape.targets(action.stage)
    elif action.kind is Kind.BACKWARD:
        recv, send = Kind.RECV_GRADIENT, Kind.SEND_GRADIENT
        before, after = shape.targets(action.stage), shape.sources(action.stage)
    else:
        return [action]

    def messages(kind: Kind, peers: list[int]) -> list[Action]:
        return [
            Action(kind, action.stage, action.micro_batch, peer=peer)
            for peer in peers
            if shape.rank_of(peer, action.micro_batch) != rank
        ]

    return [*messages(recv, before), action, *messages(send, after)]
