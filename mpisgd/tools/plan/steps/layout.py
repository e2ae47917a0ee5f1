"""`DividedModel`: a layout of a job: its ranks and its stages, and what each rank does.

What time it takes is in pipeline_step.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mpisgd.errors import InvalidArgument
from mpisgd.methods.cost_kit import Op
from mpisgd.methods.peak_memory import Memory, peak_of
from mpisgd.pipeline.cost import cost
from mpisgd.pipeline.schedules.schedule import Schedule
from mpisgd.pipeline.schedules.shape import PipelineShape
from mpisgd.tools.plan.steps.job import PlannedJob
from mpisgd.tools.plan.steps.parallel import Grid, Parallel, grid_of
from mpisgd.tools.plan.steps.stages import PlannedStage, stages_of

__all__ = ["DividedModel", "divide"]


@dataclass(frozen=True)
class DividedModel:
    """A model over the ranks of a layout.

    Attributes:
        grid: the ranks.
        shape: of a pipeline: which of its ranks has which stages.
        stages: of the model.
        schedule: in which order they compute.
    """

    grid: Grid
    shape: PipelineShape
    stages: list[PlannedStage]
    schedule: Schedule

    def numel_of(self, place: int) -> float:
        """Return the parameters of a rank at a place of the pipelines."""
        return sum(self.stages[stage].numel for stage in self.shape.stages_of(place))

    def cost(self, place: int) -> Iterator[Op]:
        """Yield what such a rank does in a step."""
        sizes = [each.sizes for each in self.stages]
        return cost(self.schedule, self.shape, sizes, place, num_pipelines=self.grid.replicas)

    def memory(self) -> Memory:
        """Return the memory of the rank that has most: as a rule a pipeline's first, by its activations."""
        return max((peak_of(self.cost(place)) for place in range(self.grid.pp)), key=lambda each: each.total)


def divide(job: PlannedJob, layout: Parallel) -> DividedModel:
    """Return a layout of a job.

    Raises:
        InvalidArgument: the model or the ranks cannot be divided so, or what travels is compressed.
    """
    if job.is_compressed():
        raise InvalidArgument(f"plan: {layout} with {job.compression}; expected no compression")
    grid = grid_of(job.cluster, layout)
    number = layout.micro_batches_of(job.profile.batch * grid.sequences)
    stages = stages_of(job.profile, grid, layout, number, job.algorithm)
    shape = PipelineShape(layout.table.place(layout.num_stages, grid.pp), number)
    layout.table.check(shape)
    return DividedModel(grid, shape, stages, layout.table)
