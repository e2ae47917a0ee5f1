"""The stages of a model: which blocks, and what a micro-batch takes, sends and keeps there.

    stage 0: embedding, block 0, block 1 | stage 1: block 2, block 3 | ...      times as equal as can be

With t ranks along tp, a block of f seconds for all examples of a pipeline takes f / t, and its all-reduces
of the micro-batch's activations, which nothing hides (Shoeybi and others 2019).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mpisgd.errors import InvalidArgument
from mpisgd.pipeline.balance import balance
from mpisgd.pipeline.cost import StageSizes
from mpisgd.tools.plan.models.blocks import Block
from mpisgd.tools.plan.models.model import StepProfile
from mpisgd.tools.plan.simulation.collectives import AUTO, cost_of, fastest
from mpisgd.tools.plan.simulation.costs import Cost
from mpisgd.tools.plan.steps.parallel import Grid, Parallel

__all__ = ["PlannedStage", "stages_of", "sum_cost"]


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
    share = grid.tp * grid.pp / num_micro_batches  # of a rank's batch, in a micro-batch
    passes = [_Pass(block, grid, share, algorithm) for block in blocks]
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
    """A micro-batch in a block."""

    def __init__(self, block: Block, grid: Grid, share: float, algorithm: str) -> None:
        self.output_bytes = block.output_bytes * share
        self.sums = (self.output_bytes,) * (block.all_reduces if grid.tp > 1 else 0)
        cost = sum_cost(grid, self.output_bytes, algorithm) if self.sums else Cost(0.0, 0.0)
        sums_s = len(self.sums) * cost.seconds(self.output_bytes)
        forward_s, backward_s = block.seconds_of(share, grid.tp)
        self.forward_s, self.backward_s = forward_s + sums_s, backward_s + sums_s
        self.numel = block.numel_of(grid.tp)
        self.activation_bytes = block.activations_of(grid.tp) * share


def sum_cost(grid: Grid, nbytes: float, algorithm: str) -> Cost:
    """Return the time of an all-reduce of activations, with the check that all ranks do the same."""
    group = grid.tensor_group
    check = group.operation_s + (group.between.latency_s if group.hosts > 1 else 0.0)
    cost = cost_of(group, fastest(group, nbytes, algorithm)).at(nbytes)
    return Cost(cost.alpha_s + check, cost.beta_s_per_byte)


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
