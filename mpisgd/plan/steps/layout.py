"""`DividedModel`: a layout of a job: its ranks, its stages, and the schedule's actions on each rank.

What time it takes is in pipeline_step.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mpisgd.errors import InvalidArgument
from mpisgd.methods.peak_memory import Memory
from mpisgd.pipeline.schedules.action import Action, Kind
from mpisgd.pipeline.schedules.shape import PipelineShape
from mpisgd.plan.models.model import StepProfile
from mpisgd.plan.steps.job import PlannedJob
from mpisgd.plan.steps.parallel import Grid, Parallel, grid_of
from mpisgd.plan.steps.stages import PlannedStage, stages_of

__all__ = ["DividedModel", "divide"]


@dataclass(frozen=True)
class DividedModel:
    """A model over the ranks of a layout.

    Attributes:
        grid: the ranks.
        shape: of a pipeline: which of its ranks has which stages.
        stages: of the model.
        actions: of each rank of a pipeline, in order, messages included.
    """

    grid: Grid
    shape: PipelineShape
    stages: list[PlannedStage]
    actions: list[list[Action]]

    def numel_of(self, place: int) -> float:
        """Return the parameters of a rank at a place of the pipelines."""
        return sum(self.stages[stage].numel for stage in self.shape.stages_of(place))

    def kept_bytes(self, place: int) -> float:
        """Return the activations that such a rank has at most at the same time."""
        return max(self._kept(place))

    def memory(self, profile: StepProfile) -> Memory:
        """Return what the rank keeps that has most: as a rule the first of a pipeline, by its activations."""
        ranks = []
        for place in range(self.grid.pp):
            share = self.numel_of(place) / profile.numel
            nbytes, state = profile.nbytes * share, profile.state_bytes * share
            ranks.append(Memory(nbytes, nbytes, state, activations=self.kept_bytes(place)))
        return max(ranks, key=lambda each: each.total)

    def _kept(self, place: int) -> Iterator[float]:
        kept = 0.0
        for action in self.actions[place]:
            stage = self.stages[action.stage]
            if action.kind is Kind.FORWARD:
                kept += stage.activation_bytes
                yield kept
            elif action.kind is Kind.BACKWARD:
                yield kept + stage.pass_bytes
                kept -= stage.activation_bytes


def divide(job: PlannedJob, layout: Parallel) -> DividedModel:
    """Return a layout of a job.

    Raises:
        InvalidArgument: the model or the ranks cannot be divided so, or what travels is compressed.
    """
    if job.is_compressed():
        raise InvalidArgument(f"plan: {layout} with {job.compression}; expected no compression")
    grid = grid_of(job.cluster, layout)
    number = layout.micro_batches_of(job.profile.batch * grid.tp * grid.pp)
    stages = stages_of(job.profile, grid, layout, number, job.algorithm)
    shape = PipelineShape(layout.table.place(layout.num_stages, grid.pp), number)
    layout.table.check(shape)
    actions = [layout.table.actions(shape, place, 0) for place in range(grid.pp)]
    return DividedModel(grid, shape, stages, actions)
