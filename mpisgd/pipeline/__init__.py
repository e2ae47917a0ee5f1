"""Pipelines: models whose stages are on different ranks, trained in micro-batches.

    pipeline = mpisgd.pipeline.Pipeline(model, schedule="pipedream", num_micro_batches=8, loss=loss,
                                        optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    loss = pipeline.step(inputs, targets)

    print(mpisgd.pipeline.PipeDream().plan(num_stages=4, num_micro_batches=8))

A schedule is plain data: for each rank a list of actions, which prints as a table, draws as a picture and is
done by one worker. See docs/how-to/large-models/pipelines.md.
"""

from mpisgd.pipeline.layer_costs import LayerCost, costs_table, measure_layers
from mpisgd.pipeline.model_parts import split
from mpisgd.pipeline.partition import Partition, PlannedStage, partition
from mpisgd.pipeline.pipeline import Pipeline
from mpisgd.pipeline.recording import Recording
from mpisgd.pipeline.schedules.action import Action, Kind
from mpisgd.pipeline.schedules.flushing import GPipe, Interleaved, OneForwardOneBackward
from mpisgd.pipeline.schedules.picture import draw
from mpisgd.pipeline.schedules.plan import Plan
from mpisgd.pipeline.schedules.schedule import Schedule
from mpisgd.pipeline.schedules.shape import PipelineShape
from mpisgd.pipeline.schedules.simulation import Costs
from mpisgd.pipeline.schedules.stashing import PipeDream, PipeDream2BW
from mpisgd.pipeline.schedules.timeline import PipelineTimeline, Span
from mpisgd.pipeline.skips import Pop, Stash

__all__ = [
    "Action",
    "Costs",
    "GPipe",
    "Interleaved",
    "Kind",
    "LayerCost",
    "OneForwardOneBackward",
    "Partition",
    "PipeDream",
    "PipeDream2BW",
    "Pipeline",
    "PipelineShape",
    "PipelineTimeline",
    "Plan",
    "PlannedStage",
    "Pop",
    "Recording",
    "Schedule",
    "Span",
    "Stash",
    "costs_table",
    "draw",
    "measure_layers",
    "partition",
    "split",
]
