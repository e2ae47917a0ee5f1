"""Schedules that end each step with an empty pipeline: one version of the weights, as in one process.

GPipe, 3 stages, 3 micro-batches              OneForwardOneBackward

F0 F1 F2  .  .  .  . B2 B1 B0                 F0 F1 F2  .  . B0  . B1  . B2
 . F0 F1 F2  .  . B2 B1 B0  .                  . F0 F1  . B0 F2 B1  . B2  .
 .  . F0 F1 F2 B2 B1 B0  .  .                  .  . F0 B0 F1 B1 F2 B2  .  .
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mpisgd.arguments import check_positive
from mpisgd.errors import InvalidArgument
from mpisgd.pipeline.schedules.action import Action, Kind
from mpisgd.pipeline.schedules.schedule import Schedule
from mpisgd.pipeline.schedules.shape import PipelineShape, Ranks, in_turn
from mpisgd.pipeline.schedules.simulation import simulate

__all__ = ["GPipe", "Interleaved", "OneForwardOneBackward"]

Passes = list[Action]


def forward(stage: int, micro_batch: int) -> Action:
    """Return the forward of a micro-batch with the weights that the step begins with."""
    return Action(Kind.FORWARD, stage, micro_batch)


def backward(stage: int, micro_batch: int) -> Action:
    """Return its backward."""
    return Action(Kind.BACKWARD, stage, micro_batch)


class Flushing(Schedule):
    """A schedule that is given by the order of each step's passes; gradients are combined at the end."""

    def order(self, shape: PipelineShape, rank: int, step: int) -> list[Action]:
        """See `Schedule.order`."""
        passes = _passes(self, shape)[rank]
        first = step * shape.num_micro_batches
        moved = [each._replace(micro_batch=each.micro_batch + first, version=step) for each in passes]
        return moved + _update(shape, rank, step + 1)

    @abc.abstractmethod
    def passes(self, shape: PipelineShape) -> list[Passes]:
        """Return the forwards and backwards of a step, for each rank."""


@lru_cache(maxsize=64)
def _passes(schedule: Flushing, shape: PipelineShape) -> list[Passes]:
    return schedule.passes(shape)


def _update(shape: PipelineShape, rank: int, version: int) -> list[Action]:
    """Return the actions after the passes: reductions first, which all ranks come to in the same order."""
    stages = shape.stages_of(rank)
    replicated = [stage for stage in stages if shape.replicas[stage] > 1]
    ties = [tie for tie in range(len(shape.ties)) if rank in shape.ranks_of_tie(tie)]
    return [
        *(Action(Kind.REDUCE, stage, version=version) for stage in replicated),
        *(Action(Kind.REDUCE_TIED, tie, version=version) for tie in ties),
        *(Action(Kind.UPDATE, stage, version=version, keep_from=version) for stage in stages),
    ]


def _on_their_ranks(by_stage: Sequence[Sequence[Passes]], shape: PipelineShape) -> list[Passes]:
    """Return the passes of each rank, from those of each replica of each stage.

    A rank with several stages does their passes in the order in which they would begin if each stage had a
    rank of its own. What a pass needs ends before it begins there, so no rank waits for ever.
    """
    workers = [passes for replicas in by_stage for passes in replicas]
    starts = [sum(shape.replicas[:stage]) for stage in range(shape.num_stages)]
    numbers = zip(starts, shape.replicas, strict=True)
    apart = tuple(tuple(range(start, start + count)) for start, count in numbers)
    timeline = simulate(workers, PipelineShape(apart, shape.num_micro_batches, shape.skips))
    spans = [(span.begin, span.action) for own in timeline.spans for span in own]
    spans.sort(key=lambda each: (each[0], each[1].stage))
    everyones: list[Passes] = [[] for _ in range(shape.num_ranks)]
    for _, action in spans:
        everyones[shape.rank_of(action.stage, action.micro_batch)].append(action)
    return everyones


class ByReplica(Flushing):
    """A schedule that is given by the order of each replica's passes, as if it had a rank of its own."""

    def passes(self, shape: PipelineShape) -> list[Passes]:
        """See `Flushing.passes`."""
        return _on_their_ranks(
            [
                [self._of_replica(shape, stage, replica) for replica in range(number)]
                for stage, number in enumerate(shape.replicas)
            ],
            shape,
        )

    @abc.abstractmethod
    def _of_replica(self, shape: PipelineShape, stage: int, replica: int) -> Passes:
        """Return the passes of a replica of a stage."""


@dataclass(frozen=True)
class GPipe(ByReplica):
    """All forwards, then all backwards, the last micro-batch first (Huang et al. 2019).

    Keeps the activations of all micro-batches; `checkpoint=True` reduces them to the inputs and outputs of
    stages.
    """

    def _of_replica(self, shape: PipelineShape, stage: int, replica: int) -> Passes:
        own = shape.micro_batches_of(stage, replica)
        return [forward(stage, each) for each in own] + [backward(stage, each) for each in reversed(own)]


@dataclass(frozen=True)
class OneForwardOneBackward(ByReplica):
    """1F1B: after the first forwards each stage does one backward after each forward.

    The order within a step is that of PipeDream (Narayanan et al. 2019), and the step ends with an empty
    pipeline: PipeDream-flush (Narayanan et al. 2021). The bubble is that of GPipe, but stage s of p keeps the
    activations of at most p - s micro-batches.
    """

    def _of_replica(self, shape: PipelineShape, stage: int, replica: int) -> Passes:
        own = shape.micro_batches_of(stage, replica)
        return one_forward_one_backward(
            [forward(stage, each) for each in own],
            [backward(stage, each) for each in own],
            shape.depth(stage),
        )


def one_forward_one_backward(forwards: Sequence[Action], backwards: Sequence[Action], depth: int) -> Passes:
    """Return `depth` forwards, then a forward and a backward in turn, then the backwards that are left."""
    depth = min(depth, len(forwards))
    pairs = zip(forwards[depth:], backwards, strict=False)
    steady = [action for pair in pairs for action in pair]
    return [*forwards[:depth], *steady, *backwards[len(forwards) - depth :]]


@dataclass(frozen=True)
class Interleaved(Flushing):
    """1F1B with several stages per rank, in turn: rank r of p has the stages r, p + r, 2 p + r, ...

    The bubble is that of 1F1B divided by the number of stages per rank v, for v times as many messages; the
    number of micro-batches is a multiple of p. Rank r begins with 2 (p - r - 1) + (v - 1) p forwards: p
    micro-batches go through all its stages before the next p come (Narayanan et al. 2021, "Efficient
    large-scale language model training on GPU clusters using Megatron-LM").
    """

    def place(self, num_stages: int, num_ranks: int) -> Ranks:
        """See `Schedule.place`."""
        return in_turn(num_stages, num_ranks)

    def check(self, shape: PipelineShape) -> None:
        """See `Schedule.check`."""
        if shape.has_replicas:
            raise InvalidArgument("Interleaved: stages have no replicas; take OneForwardOneBackward")
        if shape.ranks != in_turn(shape.num_stages, shape.num_ranks) or shape.num_stages % shape.num_ranks:
            raise InvalidArgument(
                f"Interleaved: {shape.num_stages} stages on {shape.num_ranks} ranks; expected a multiple, "
                "with stage s on rank s modulo the number of ranks"
            )
        if shape.num_micro_batches % shape.num_ranks:
            raise InvalidArgument(
                f"Interleaved: num_micro_batches={shape.num_micro_batches}; expected a multiple of the "
                f"{shape.num_ranks} ranks"
            )

    def passes(self, shape: PipelineShape) -> list[Passes]:
        """See `Flushing.passes`."""
        return [self._of_rank(shape, rank) for rank in range(shape.num_ranks)]

    def _of_rank(self, shape: PipelineShape, rank: int) -> Passes:
        num_ranks, per_rank = shape.num_ranks, shape.num_stages // shape.num_ranks
        check_positive("Interleaved", "stages per rank", per_rank, whole=True)
        turns = [(turn, each) for turn in range(per_rank) for each in range(num_ranks)]
        firsts = range(0, shape.num_micro_batches, num_ranks)
        forwards = [
            forward(turn * num_ranks + rank, first + each) for first in firsts for turn, each in turns
        ]
        backwards = [
            backward((per_rank - 1 - turn) * num_ranks + rank, first + each)
            for first in firsts
            for turn, each in turns
        ]
        if per_rank == 1:
            return one_forward_one_backward(forwards, backwards, shape.depth(rank))
        depth = 2 * (num_ranks - rank - 1) + (per_rank - 1) * num_ranks
        return one_forward_one_backward(forwards, backwards, depth)
