"""`Schedule`: in which order the stages of a pipeline compute, and with which version of their weights."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpisgd.arguments import check_positive
from mpisgd.errors import InvalidArgument
from mpisgd.pipeline.schedules.action import Action
from mpisgd.pipeline.schedules.plan import Plan, with_messages
from mpisgd.pipeline.schedules.shape import PipelineShape, Ranks, in_blocks, with_replicas
from mpisgd.pipeline.schedules.simulation import simulate

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule(abc.ABC):
    """The order of a pipeline's actions. A subclass is a frozen dataclass with the same fields on all ranks.

    Attributes:
        flushes: whether a step ends with an empty pipeline, so that its gradients belong to the weights at
            its beginning. If not, the next step begins before all backward passes of this one are done.
        updates_each_micro_batch: whether each micro-batch is a minibatch with its own update.
    """

    flushes: ClassVar[bool] = True
    updates_each_micro_batch: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The name in messages and pictures."""
        return type(self).__name__

    def place(self, num_stages: int, num_ranks: int) -> Ranks:
        """Return the ranks of each stage, without replicas."""
        return in_blocks(num_stages, num_ranks)

    def check(self, shape: PipelineShape) -> None:  # noqa: B027  # most fit any
        """Raise if the schedule does not fit a pipeline.

        Raises:
            InvalidArgument: says why.
        """

    @abc.abstractmethod
    def order(self, shape: PipelineShape, rank: int, step: int) -> list[Action]:
        """Return a rank's actions in a step, without messages; steps count from the empty pipeline."""

    def rest(self, shape: PipelineShape, rank: int, num_steps: int) -> list[Action]:
        """Return a rank's actions that empty the pipeline after this many steps."""
        return []

    def actions(self, shape: PipelineShape, rank: int, step: int) -> list[Action]:
        """Return a rank's actions in a step, including messages."""
        return with_messages(self.order(shape, rank, step), rank, shape)

    def last_actions(self, shape: PipelineShape, rank: int, num_steps: int) -> list[Action]:
        """Return a rank's actions after the last step, including messages."""
        return with_messages(self.rest(shape, rank, num_steps), rank, shape)

    def plan_of(self, shape: PipelineShape, num_steps: int = 1) -> Plan:
        """Return the plan of this many steps.

        Raises:
            InvalidArgument: the schedule does not fit.
        """
        check_positive("pipeline", "num_steps", num_steps, whole=True)
        self.check(shape)
        everyones = []
        for rank in range(shape.num_ranks):
            own = [action for step in range(num_steps) for action in self.actions(shape, rank, step)]
            everyones.append((*own, *self.last_actions(shape, rank, num_steps)))
        simulate(everyones, shape)  # raises if the ranks would wait for ever
        return Plan(self.name, shape, tuple(everyones))

    def plan(
        self,
        num_stages: int,
        num_micro_batches: int,
        *,
        num_ranks: int | None = None,
        num_steps: int = 1,
        replicas: Sequence[int] | None = None,
    ) -> Plan:
        """Return the actions of all ranks, to be printed or drawn.

        Args:
            num_stages: number of stages of the model.
            num_micro_batches: number of micro-batches of a step.
            num_ranks: number of ranks; by default one per stage.
            num_steps: number of steps.
            replicas: number of ranks of each stage, instead of `num_ranks`.

        Raises:
            InvalidArgument: the schedule does not fit.
        """
        if replicas is not None and (num_ranks is not None or len(replicas) != num_stages):
            raise InvalidArgument(
                f"pipeline: replicas={replicas} for {num_stages} stages, num_ranks={num_ranks}; expected one "
                "number per stage, and no num_ranks"
            )
        ranks = self.place(num_stages, num_ranks or num_stages) if replicas is None else None
        return self.plan_of(
            PipelineShape(ranks or with_replicas(replicas or ()), num_micro_batches), num_steps
        )
