"""When each action of a schedule begins and ends, if each takes as long as is said: the ideal timeline.

Every rank does its actions in their order, each as soon as what it needs is there:

    forward of stage s, micro-batch b     the forwards of b on the stages before it that it is connected to
    backward of stage s, micro-batch b    its forward, and the backwards of b on the stages after it
    REDUCE, REDUCE_TIED                   all ranks that take part have come to it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpisgd.errors import InvalidArgument
from mpisgd.pipeline.schedules.action import Action, Kind
from mpisgd.pipeline.schedules.shape import PipelineShape
from mpisgd.pipeline.schedules.timeline import PipelineTimeline, Span

__all__ = ["Costs", "simulate"]

Done = dict[tuple[Kind, int, int], tuple[float, int]]  # end and rank
PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Durations of actions: a number, or one for each stage.

    Attributes:
        forward: forward pass of a micro-batch.
        backward: backward pass of a micro-batch.
        update: the optimizer's step.
        transfer: time from the end of a pass until its result has arrived on another rank.
    """

    forward: PerStage = 1
    backward: PerStage = 1
    update: PerStage = 0
    transfer: float = 0

    def of(self, action: Action) -> float:
        """Return how long an action takes."""
        by_kind: Mapping[Kind, PerStage] = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.UPDATE: self.update,
        }
        cost = by_kind.get(action.kind, 0)
        return cost[action.stage] if isinstance(cost, Sequence) else cost


def simulate(
    actions: Sequence[Sequence[Action]], shape: PipelineShape, costs: Costs | None = None
) -> PipelineTimeline:
    """Return when each action happens.

    Args:
        actions: of each rank, in order; messages among them take no time of their own.
        shape: of the pipeline.
        costs: how long actions take; by default one time slot for each forward and each backward.

    Raises:
        InvalidArgument: the ranks would wait for each other for ever; says where.
    """
    run = _Simulation(actions, shape, costs or Costs())
    while run.advance():
        pass
    return run.timeline()


class _Simulation:
    def __init__(self, actions: Sequence[Sequence[Action]], shape: PipelineShape, costs: Costs) -> None:
        messages = (Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)
        self.actions = [[each for each in own if each.kind not in messages] for own in actions]
        self.shape, self.costs = shape, costs
        self.next = [0] * len(self.actions)
        self.free = [0.0] * len(self.actions)
        self.done: Done = {}
        self.spans: list[list[Span]] = [[] for _ in self.actions]

    def advance(self) -> bool:
        """Go on with each rank as far as possible; return whether any could."""
        moved = [self._advance_rank(rank) for rank in range(len(self.actions))]
        return any(moved)

    def timeline(self) -> PipelineTimeline:
        """Return the result, or raise where a rank has not come to its end."""
        stuck = {rank: self._head(rank) for rank in range(len(self.actions))}
        texts = [f"rank {rank} at {head}" for rank, head in stuck.items() if head is not None]
        if texts:
            raise InvalidArgument(f"pipeline: this order never ends: {', '.join(texts)}")
        return PipelineTimeline(tuple(map(tuple, self.spans)))

    def _head(self, rank: int) -> Action | None:
        own = self.actions[rank]
        return own[self.next[rank]] if self.next[rank] < len(own) else None

    def _advance_rank(self, rank: int) -> bool:
        moved = False
        while (action := self._head(rank)) is not None and self._try(rank, action):
            moved = True
        return moved

    def _try(self, rank: int, action: Action) -> bool:
        """Do an action if all that it needs is there."""
        if action.kind.is_joint:
            return self._try_together(action)
        needs = [self.done.get(need) for need in self._needs(action)]
        if None in needs:
            return False
        ready = [end + (self.costs.transfer if of != rank else 0) for end, of in filter(None, needs)]
        begin = max([self.free[rank], *ready])
        self._finish(rank, action, begin, begin + self.costs.of(action))
        return True

    def _try_together(self, action: Action) -> bool:
        tied = action.kind is Kind.REDUCE_TIED
        ranks = self.shape.ranks_of_tie(action.stage) if tied else self.shape.ranks[action.stage]
        if any(self._head(rank) != action for rank in ranks):
            return False
        begin = max(self.free[rank] for rank in ranks)
        for rank in ranks:
            self._finish(rank, action, begin, begin)
        return True

    def _needs(self, action: Action) -> list[tuple[Kind, int, int]]:
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            return [(Kind.FORWARD, src, micro_batch) for src in self.shape.sources(stage)]
        if action.kind is Kind.BACKWARD:
            later = [(Kind.BACKWARD, dst, micro_batch) for dst in self.shape.targets(stage)]
            return [(Kind.FORWARD, stage, micro_batch), *later]
        return []

    def _finish(self, rank: int, action: Action, begin: float, end: float) -> None:
        self.done[action.kind, action.stage, action.micro_batch] = end, rank
        self.free[rank] = end
        self.next[rank] += 1
        self.spans[rank].append(Span(action, begin, end))
