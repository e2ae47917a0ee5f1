"""What a `Pipeline` is made of: its arguments checked and agreed on by all ranks, then its groups opened."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpisgd.arguments import check_callable, check_flag, ranks_by_text, ranks_text, shown
from mpisgd.collectives.coalesced import broadcast_coalesced
from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.group import Group
from mpisgd.errors import CollectiveMismatch, InvalidArgument
from mpisgd.job.groups import open_group
from mpisgd.pipeline.model_parts import (
    Stages,
    Tied,
    build_stages,
    check_tied,
    split,
    tied_by_identity,
    unify_tied,
)
from mpisgd.pipeline.schedules.named import as_schedule
from mpisgd.pipeline.schedules.schedule import Schedule
from mpisgd.pipeline.schedules.shape import PipelineShape, Ranks, with_replicas
from mpisgd.pipeline.skips import popped_names, skips_between, stashed_names
from mpisgd.pipeline.stage import Connections, Stage
from mpisgd.pipeline.weights import SingleVersion, StashedVersions
from mpisgd.pipeline.worker import Tie

__all__ = [
    "MakeOptimizer",
    "Options",
    "OwnParts",
    "Skips",
    "agreed_parts",
    "make_stages",
    "open_replicas",
    "open_ties",
]

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Skips = Mapping[tuple[int, int], tuple[str, ...]]
REDUCTIONS = ("mean", "sum")


class Options(NamedTuple):
    """The arguments of a `Pipeline`; see there."""

    schedule: Schedule | str
    num_micro_batches: int
    loss: Any
    optimizer: MakeOptimizer | None
    replicas: int | Sequence[int] | None
    tied: Sequence[Any]
    loss_reduction: str
    checkpoint: bool
    loss_on_all_ranks: bool


class OwnParts(NamedTuple):
    """What this rank has made of its arguments, before it has heard of the others.

    Attributes:
        schedule: the schedule.
        shape: of the pipeline, without its skip connections.
        modules: of this rank's stages.
        tied: the tied parameters of all stages.
        tied_params: by tie, the parameter of this rank, or none.
        optimizers: of this rank's stages with parameters.
    """

    schedule: Schedule
    shape: PipelineShape
    modules: Mapping[int, nn.Module]
    tied: Sequence[Tied]
    tied_params: Sequence[Sequence[nn.Parameter]]
    optimizers: Mapping[int, torch.optim.Optimizer]


def own_parts(stages: Stages, options: Options, rank: int, size: int) -> OwnParts:
    """Check the arguments and make this rank's modules and optimizers. Sends nothing.

    Raises:
        InvalidArgument: an argument is wrong; or whatever a function of the user's raises.
    """
    schedule = _check(options)
    listed, ranks = _place(stages, options.replicas, schedule, size)
    # In this order: two modules that are one object have been tied by who made them.
    tied = [*tied_by_identity(listed), *check_tied(options.tied, len(listed))]
    ties = tuple(tuple(stage for stage, _ in places) for places in tied)
    shape = PipelineShape(ranks, options.num_micro_batches, ties=ties)
    schedule.check(shape)
    modules = build_stages(listed, shape.stages_of(rank))
    tied_params = [unify_tied(places, modules) for places in tied]
    optimizers = {} if options.optimizer is None else _make_optimizers(options.optimizer, modules)
    return OwnParts(schedule, shape, modules, tied, tied_params, optimizers)


def _check(options: Options) -> Schedule:
    schedule = as_schedule(options.schedule)
    check_callable("pipeline", "loss", options.loss)
    check_flag("pipeline", "checkpoint", options.checkpoint)
    check_flag("pipeline", "loss_on_all_ranks", options.loss_on_all_ranks)
    if options.optimizer is not None:
        check_callable("pipeline", "optimizer", options.optimizer)
    elif not schedule.flushes:
        raise InvalidArgument(
            f"pipeline: optimizer=None does not go with {schedule.name}, which updates within a step"
        )
    if options.loss_reduction not in REDUCTIONS:
        raise InvalidArgument(
            f"pipeline: loss_reduction={shown(options.loss_reduction)}; expected one of {REDUCTIONS}"
        )
    return schedule


def _place(
    stages: Stages, replicas: int | Sequence[int] | None, schedule: Schedule, size: int
) -> tuple[Sequence[Any], Ranks]:
    """Return the stages as a list, and the ranks of each."""
    if isinstance(stages, nn.Sequential):
        stages = split(stages, _num_stages(replicas, size))
    if isinstance(stages, (str, bytes)) or not isinstance(stages, Sequence) or not stages:
        raise InvalidArgument(
            f"pipeline: stages is a {type(stages).__name__}; expected an nn.Sequential, or a list of modules "
            "or of functions that make them"
        )
    if replicas is None:
        return stages, schedule.place(len(stages), size)
    numbers = [replicas] * len(stages) if isinstance(replicas, int) else list(replicas)
    ranks = with_replicas(numbers)
    if len(numbers) != len(stages) or sum(numbers) != size:
        raise InvalidArgument(
            f"pipeline: replicas={shown(replicas)} for {len(stages)} stages on {size} ranks; expected one "
            "number per stage, which add up to the ranks"
        )
    return stages, ranks


def _num_stages(replicas: int | Sequence[int] | None, size: int) -> int:
    if isinstance(replicas, int):
        return max(1, size // max(1, replicas))
    return size if replicas is None else len(replicas)


def _make_optimizers(
    make: MakeOptimizer, modules: Mapping[int, nn.Module]
) -> dict[int, torch.optim.Optimizer]:
    """Return an optimizer for each stage; a parameter of two stages belongs to the first.

    It has those that are frozen, too, which the program may train later.
    """
    made: dict[int, torch.optim.Optimizer] = {}
    taken: set[nn.Parameter] = set()
    for number, module in modules.items():
        params = [param for param in module.parameters() if param not in taken]
        taken.update(params)
        if params:
            made[number] = make(params)
            if not isinstance(made[number], torch.optim.Optimizer):
                raise InvalidArgument(
                    f"pipeline: optimizer made {shown(made[number])}; expected a torch optimizer, as from "
                    "lambda params: torch.optim.SGD(params, lr=0.1)"
                )
    return made


def agreed_parts(stages: Stages, options: Options, group: Group) -> tuple[OwnParts, Skips]:
    """Return this rank's parts, and all skip connections, once all ranks have theirs. Collective.

    Raises:
        Exception: what went wrong on this rank; on others an InvalidArgument that tells of it.
        CollectiveMismatch: the ranks have given different arguments.
    """
    parts: OwnParts | Exception
    try:
        parts = own_parts(stages, options, group.rank, group.size)
        mine = ("", _summary(parts, options), _names(parts))
    except Exception as exc:  # the others must hear of it
        parts, mine = exc, (f"{type(exc).__name__}: {exc}", "", {})
    told: list[Any] = [None] * group.size
    all_gather_object(told, mine, group)
    if isinstance(parts, Exception):
        raise parts
    problems = [f"rank {rank}: {text}" for rank, (text, _, _) in zip(group.ranks, told, strict=True) if text]
    if problems:
        raise InvalidArgument(f"pipeline: not made, as {'; '.join(problems)}")
    _check_alike([summary for _, summary, _ in told], group)
    skips = _skips([names for _, _, names in told], parts.shape.num_stages)
    parts = parts._replace(shape=_with_skips(parts.shape, skips))
    parts.schedule.plan_of(parts.shape, 2)  # where ranks would wait for each other, all raise
    return parts, skips


def _summary(parts: OwnParts, options: Options) -> str:
    """Describe the parts and options that must be the same on all ranks."""
    trains = "None" if options.optimizer is None else "given"
    return (
        f"{parts.schedule}, {parts.shape}, tied={parts.tied}, optimizer={trains}, "
        f"loss_reduction={options.loss_reduction!r}, loss_on_all_ranks={options.loss_on_all_ranks}"
    )


def _skips(told: Sequence[Mapping[int, tuple[list[str], list[str]]]], num_stages: int) -> Skips:
    everyones = {stage: names for own in told for stage, names in own.items()}
    by_stage = [everyones[stage] for stage in range(num_stages)]
    return skips_between([stashed for stashed, _ in by_stage], [popped for _, popped in by_stage])


def _names(parts: OwnParts) -> dict[int, tuple[list[str], list[str]]]:
    return {stage: (stashed_names(module), popped_names(module)) for stage, module in parts.modules.items()}


def _with_skips(shape: PipelineShape, skips: Skips) -> PipelineShape:
    over = tuple(sorted(pair for pair in skips if pair[1] > pair[0] + 1))
    return PipelineShape(shape.ranks, shape.num_micro_batches, over, shape.ties)


def _check_alike(summaries: Sequence[str], group: Group) -> None:
    by_text = ranks_by_text(group.ranks, summaries)
    if len(by_text) > 1:
        lines = [f"  {ranks_text(ranks)}: {text}" for text, ranks in by_text.items()]
        raise CollectiveMismatch("\n".join(["pipeline: the ranks have given different arguments:", *lines]))


def make_stages(parts: OwnParts, skips: Skips, *, recompute: bool) -> dict[int, Stage]:
    """Return the stages of this rank."""
    weights = SingleVersion if parts.schedule.flushes else StashedVersions
    last = parts.shape.num_stages - 1
    return {
        number: Stage(
            number,
            weights(module),
            parts.optimizers.get(number),
            Connections(
                popped={src: names for (src, dst), names in skips.items() if dst == number},
                stashed={dst: names for (src, dst), names in skips.items() if src == number},
                before=number - 1,
                after=number + 1 if number < last else -1,
            ),
            recompute=recompute,
        )
        for number, module in parts.modules.items()
    }


def open_replicas(parts: OwnParts, group: Group) -> dict[int, Group]:
    """Return the groups of the replicas of this rank's stages, which start equal. Collective over each."""
    groups = {}
    for stage, module in parts.modules.items():
        if parts.shape.replicas[stage] > 1:
            groups[stage] = _open(group, parts.shape.ranks[stage], f"replicas of stage {stage}")
            _start_equal([*module.parameters(), *module.buffers()], groups[stage])
    return groups


def open_ties(parts: OwnParts, group: Group) -> dict[int, Tie]:
    """Return the ties of this rank, whose parameters start equal. Collective over the ranks of each."""
    ties = {}
    for number, params in enumerate(parts.tied_params):
        if params:
            ranks = parts.shape.ranks_of_tie(number)
            tied = _open(group, ranks, f"tied parameters {number}") if len(ranks) > 1 else None
            ties[number] = Tie(tied, ranks, params)
            if tied is not None:
                _start_equal(params, tied)
    return ties


def _open(group: Group, ranks: Iterable[int], name: str) -> Group:
    return open_group(group.job, [group.ranks[rank] for rank in ranks], name=f"{group.name}, {name}")


def _start_equal(tensors: Sequence[Tensor], group: Group) -> None:
    broadcast_coalesced([tensor.detach() for tensor in tensors], group.ranks[0], group)
