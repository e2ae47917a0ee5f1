"""A `Parallel` layout without a pipeline: what each rank of a tp group, and of a ring, computes and sends.

Its step is that of data parallelism over the ranks that have the same parameters: fewer of these, and shorter
passes, with the all-reduces of activations in them, and with what attention waits for keys of other ranks.
"""

from collections.abc import Mapping
from dataclasses import replace

from mpisgd.methods.cost_kit import CONTEXT, TENSOR, Collective
from mpisgd.methods.costs import cost_of
from mpisgd.methods.synchronous.synchronous import Synchronous
from mpisgd.methods.wire_bytes import sent_bytes
from mpisgd.tools.plan.models.blocks import Block
from mpisgd.tools.plan.models.model import Gradient, StepProfile
from mpisgd.tools.plan.simulation.collectives import busiest_bytes, fastest
from mpisgd.tools.plan.steps.graph import PlannedStep
from mpisgd.tools.plan.steps.job import PlannedJob
from mpisgd.tools.plan.steps.parallel import Parallel
from mpisgd.tools.plan.steps.pipeline_step import plan_pipeline
from mpisgd.tools.plan.steps.stages import DividedModel, divide, message_cost, sum_cost
from mpisgd.tools.plan.steps.step_time import plan_step

__all__ = ["plan_layout"]


def plan_layout(job: PlannedJob, layout: Parallel) -> PlannedStep:
    """Return the step of a layout: a pipeline by its schedule; without one, as data parallelism over dp.

    Raises:
        InvalidArgument: see `divide`.
    """
    if layout.pp > 1:
        return plan_pipeline(job, layout)
    model = divide(job, layout)
    found = plan_step(job_of_stage(job, model), cost_of(Synchronous()))
    inside = [op for op in model.cost(0) if isinstance(op, Collective) and op.group in (TENSOR, CONTEXT)]
    sums = [op.nbytes for op in inside if op.group == TENSOR]
    messages = [op.nbytes / op.num_ranks for op in inside if op.group == CONTEXT]
    costs = [(sum_cost(model.grid, nbytes, job.algorithm), nbytes) for nbytes in sums]
    rounds = model.grid.cp - 1
    around = [(message_cost(model.grid)[0].at(nbytes), nbytes) for nbytes in messages] * rounds
    sent = sent_bytes(inside, job.world)
    traffic = add_traffic(found.traffic, model, sum(sums), job.algorithm)
    return replace(
        found,
        communication_s=found.communication_s + sum(cost.seconds(nbytes) for cost, nbytes in costs + around),
        alpha_s=found.alpha_s + sum(cost.alpha_s for cost, _ in costs + around),
        sent_bytes=found.sent_bytes + sent.get(TENSOR, 0.0) + sent.get(CONTEXT, 0.0),
        traffic=_with_rings(traffic, model, rounds * sum(messages)),
    )


def job_of_stage(job: PlannedJob, model: DividedModel) -> PlannedJob:
    """Return the step of one rank of each tp group, with the ranks that have the same parameters."""
    profile, grid = job.profile, model.grid
    (stage,), passes = model.stages, model.shape.num_micro_batches
    forward_s, backward_s = stage.forward_s * passes, stage.backward_s * passes
    gradients = _gradients(profile, grid.tp, forward_s, stage.backward_s)
    late_s = stage.backward_s * (passes - 1)  # gradients are complete in the last backward pass
    divided = StepProfile(
        profile.name,
        profile.batch * grid.tp,
        forward_s,
        backward_s,
        profile.optimizer_s * stage.numel / profile.numel,
        tuple(each._replace(ready_s=each.ready_s + late_s) for each in gradients),
        profile.optimizer,
    )
    return replace(job, cluster=grid.data_group, profile=divided)


def _gradients(profile: StepProfile, tp: int, start_s: float, backward_s: float) -> list[Gradient]:
    """Return a rank's gradients: those of the last block first, each at its block's end."""
    found: list[Gradient] = []
    itemsize = profile.gradients[0].itemsize
    total_s, now = sum(block.backward_s for block in profile.blocks), 0.0
    place = sum(len(block.shapes) for block in profile.blocks)
    for block in reversed(profile.blocks):
        now += block.backward_s / total_s * backward_s if total_s else 0.0
        for number in reversed(range(len(block.shapes))):
            place -= 1
            shape = _divided(block, number, tp)
            found.append(Gradient(f"{block.name}.{number}", place, shape, itemsize, start_s + now))
    return found


def _divided(block: Block, number: int, tp: int) -> tuple[int, ...]:
    """Return the shape of a rank's part of a parameter."""
    shape = block.shapes[number]
    if len(shape) < 2 or not block.all_reduces:
        return shape
    return (-(-shape[0] // tp), *shape[1:])


def add_traffic(
    traffic: Mapping[str, float], model: DividedModel, nbytes: float, algorithm: str
) -> dict[str, float]:
    """Return the bytes on the busiest link of each level, of all groups of ranks: dp's, and sums over tp."""
    grid = model.grid
    data, tensor = grid.data_group, grid.tensor_group
    found = {level: most * grid.cluster.sharers(data, level) for level, most in traffic.items()}
    if tensor.size > 1 and nbytes:
        for level, most in busiest_bytes(tensor, fastest(tensor, nbytes, algorithm)).items():
            found[level] = found.get(level, 0.0) + most * nbytes * grid.cluster.sharers(tensor, level)
    return found


def _with_rings(traffic: Mapping[str, float], model: DividedModel, nbytes: float) -> dict[str, float]:
    """Return the same with what each rank sends to the next one of its ring."""
    grid, found = model.grid, dict(traffic)
    for level, most in message_cost(grid)[1].items() if nbytes else ():
        found[level] = found.get(level, 0.0) + most * nbytes * grid.cluster.sharers(grid.context_group, level)
    return found
