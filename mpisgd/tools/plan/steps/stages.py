"""The stages of a model: which blocks, and what a micro-batch takes, sends and keeps there.

    stage 0: embedding, block 0, block 1 | stage 1: block 2, block 3 | ...      times as equal as can be

With t ranks along tp, a block of f seconds for all examples of a pipeline takes f / t, and its all-reduces
of the micro-batch's activations, which nothing hides (Shoeybi and others 2019). With c ranks along cp each
computes a c-th of the sequences of all of them; keys and values pass all ranks, and what that takes counts as
far as it is not hidden: while a message comes, a rank computes with the one before, a c-th of its attention.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from mpisgd.context.cost import RingCost
from mpisgd.errors import InvalidArgument
from mpisgd.methods.cost_kit import Op
from mpisgd.methods.peak_memory import Memory, peak_of
from mpisgd.pipeline.balance import balance
from mpisgd.pipeline.cost import StageSizes, cost
from mpisgd.pipeline.schedules.schedule import Schedule
from mpisgd.pipeline.schedules.shape import PipelineShape
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.models.blocks import Block
from mpisgd.tools.plan.models.model import StepProfile
from mpisgd.tools.plan.simulation.collectives import AUTO, cost_of, cost_of_rounds, fastest
from mpisgd.tools.plan.simulation.costs import Cost, Costs
from mpisgd.tools.plan.simulation.messages import shift
from mpisgd.tools.plan.steps.job import PlannedJob
from mpisgd.tools.plan.steps.parallel import Grid, Parallel, grid_of

__all__ = ["DividedModel", "PlannedStage", "divide", "message_cost", "stages_of", "sum_cost"]

GRADIENT_BYTES = 4  # of an element of keys, at least


@dataclass(frozen=True)
class PlannedStage:
    """A stage on one rank.

    Attributes:
        forward_s: of a micro-batch, with its all-reduces.
        backward_s: and backward, with the forward pass again where that is recomputed.
        numel: parameters of the rank.
        sizes: of the stage, for its cost.
    """

    forward_s: float
    backward_s: float
    numel: float
    sizes: StageSizes


def stages_of(
    profile: StepProfile, grid: Grid, layout: Parallel, num_micro_batches: int, algorithm: str = AUTO
) -> list[PlannedStage]:
    """Return the stages of a layout.

    Raises:
        InvalidArgument: the blocks are not known, are fewer than stages, or cannot be divided.
    """
    blocks = profile.blocks
    if not blocks:
        raise InvalidArgument("plan: the step has no blocks to divide; expected a --model that has them")
    if len(blocks) < layout.num_stages:
        raise InvalidArgument(f"plan: {layout.num_stages} stages of {len(blocks)} blocks")
    if layout.tp > 1 and not any(block.all_reduces for block in blocks):
        raise InvalidArgument(f"plan: {profile.name} has no block that tensor parallelism divides")
    if layout.cp > 1 and not any(block.key_bytes for block in blocks):
        raise InvalidArgument(
            f"plan: {profile.name} has no block whose keys are known; expected such as gpt()"
        )
    share = grid.tp * grid.pp / num_micro_batches  # of a rank's batch, in a micro-batch
    wider = max(1.0, GRADIENT_BYTES / profile.gradients[0].itemsize)
    passes = [_Pass(block, grid, share, algorithm, wider) for block in blocks]
    sizes = balance([each.forward_s + each.backward_s for each in passes], layout.num_stages)
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    # `mpisgd.pipeline` keeps the inputs of stages, `train_text.py --checkpoint-activations` those of blocks.
    by_stage = layout.pp > 1 and layout.tp == 1
    recompute = (_Recompute.STAGES if by_stage else _Recompute.BLOCKS) if layout.recompute else None
    return [
        _stage(profile, number, passes, range(end - size, end), recompute, grid.tp)
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


class _Recompute(Enum):
    """What is computed again at once."""

    STAGES = "stages"
    BLOCKS = "blocks"


class _Pass:
    """A micro-batch in a block; gradients of keys are so many times `wider` than keys."""

    def __init__(self, block: Block, grid: Grid, share: float, algorithm: str, wider: float) -> None:
        self.output_bytes = block.output_bytes * share
        self.sums = (self.output_bytes,) * (block.all_reduces if grid.tp > 1 else 0)
        cost = sum_cost(grid, self.output_bytes, algorithm) if self.sums else Cost(0.0, 0.0)
        sums_s = len(self.sums) * cost.seconds(self.output_bytes)
        forward_s, backward_s = block.seconds_of(share, grid.tp)
        self.rings = tuple(_rings(block, grid, share, wider))
        for ring in self.rings:
            forth_s, back_s = ring_seconds(grid, ring)
            hides = block.attention / grid.cp
            forward_s += _check_s(grid.context_group) + (grid.cp - 1) * max(0.0, forth_s - hides * forward_s)
            backward_s += _check_s(grid.context_group) + (grid.cp - 1) * max(0.0, back_s - hides * backward_s)
        self.forward_s, self.backward_s = forward_s + sums_s, backward_s + sums_s
        self.numel = block.numel_of(grid.tp)
        self.activation_bytes = block.activations_of(grid.tp) * share


def _rings(block: Block, grid: Grid, share: float, wider: float) -> Iterator[RingCost]:
    """Yield the calls of attention of a block, taken as one, whose keys pass other ranks."""
    if block.key_bytes and grid.cp > 1:
        nbytes = block.key_bytes * share / (grid.tp if block.all_reduces else 1)
        yield RingCost(grid.cp, nbytes, nbytes * wider)


def message_cost(grid: Grid) -> tuple[Costs, dict[str, float]]:
    """Return the time of a message to the next rank of a ring, which all send, and the bytes on links."""
    group = grid.context_group
    return cost_of_rounds(group, [shift(group.size, 1, 1.0)])


def ring_seconds(grid: Grid, ring: RingCost) -> tuple[float, float]:
    """Return the seconds of the messages between two blocks of keys: in forward, and in backward."""
    cost, _ = message_cost(grid)
    keys_s = cost.seconds(ring.nbytes)
    return keys_s, keys_s + cost.seconds(ring.gradient_bytes)


def _check_s(group: Cluster) -> float:
    """Return the seconds in which the ranks of a group check that they call the same operation."""
    return group.operation_s + (group.between.latency_s if group.hosts > 1 else 0.0)


def sum_cost(grid: Grid, nbytes: float, algorithm: str) -> Cost:
    """Return the time of an all-reduce of activations, with the check that all ranks do the same."""
    group = grid.tensor_group
    cost = cost_of(group, fastest(group, nbytes, algorithm)).at(nbytes)
    return Cost(cost.alpha_s + _check_s(group), cost.beta_s_per_byte)


def _stage(
    profile: StepProfile,
    number: int,
    everyones: Sequence[_Pass],
    places: range,
    recompute: _Recompute | None,
    tp: int,
) -> PlannedStage:
    passes = everyones[places.start : places.stop]
    forward_s = sum(each.forward_s for each in passes)
    numel = sum(each.numel for each in passes)
    share = numel / profile.numel
    is_last = places.stop == len(everyones)
    came = everyones[places.start - 1].output_bytes if places.start else 0.0
    kept, again = _kept(passes, came, is_last, recompute)
    outputs = {} if is_last else {number + 1: passes[-1].output_bytes}
    sums = tuple(itertools.chain.from_iterable(each.sums for each in passes))
    sizes = StageSizes(
        profile.nbytes * share,
        profile.state_bytes * share,
        outputs,
        kept,
        again,
        tensor_ranks=tp,
        forward_sums=sums,
        backward_sums=sums * 2 if recompute else sums,
        rings=tuple(itertools.chain.from_iterable(each.rings for each in passes)),
        recomputes=recompute is not None,
    )
    return PlannedStage(
        forward_s=forward_s,
        backward_s=sum(each.backward_s for each in passes) + (forward_s if recompute else 0.0),
        numel=numel,
        sizes=sizes,
    )


def _kept(
    passes: Sequence[_Pass], came: float, is_last: bool, recompute: _Recompute | None
) -> tuple[float, float]:
    """Return the bytes that are kept until the backward pass besides those that `came`, and those it adds.

    A block keeps its input, and so the first one what came; and the stage what it has sent.
    """
    each = [one.activation_bytes for one in passes]
    sent = 0.0 if is_last else passes[-1].output_bytes
    if recompute is None:
        return max(0.0, sum(each) - came) + sent, 0.0
    if recompute is _Recompute.STAGES:
        return passes[-1].output_bytes, max(0.0, sum(each) - came)
    return sum(one.output_bytes for one in passes), max(each)


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
