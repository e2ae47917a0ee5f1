"""Schedules that never empty the pipeline: weights are stashed until the backwards that need them.

Stage s of p is d(s) = p - 1 - s forwards ahead of its backwards. Its time is counted in slots: in slot b it
does the forward of micro-batch b and the backward of micro-batch b - d(s):

    PipeDream, 3 stages; the version of the weights that is read

    F0v0 F1v0 F2v0    .    . B0v0 F3v1 B1v0 F4v2 B2v0 F5v3 B3v1
       . F0v0 F1v0    . B0v0 F2v1 B1v0 F3v2 B2v1 F4v3 B3v2 F5v4
       .    . F0v0 B0v0 F1v1 B1v1 F2v2 B2v2 F3v3 B3v3 F4v4 B4v4

The forwards of slot b need those of slot b on stages before; its backwards those of slot b - 1 on stages
after. So no rank waits for ever, also one with several stages that does their slots in turn.
"""

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mpisgd.arguments import check_flag
from mpisgd.errors import InvalidArgument
from mpisgd.pipeline.schedules.action import Action, Kind
from mpisgd.pipeline.schedules.schedule import Schedule
from mpisgd.pipeline.schedules.shape import PipelineShape

__all__ = ["PipeDream", "PipeDream2BW"]


class Stashing(Schedule):
    """A schedule in slots. Replicas count slots in micro-batches of their own: they take them in turn."""

    flushes = False

    def check(self, shape: PipelineShape) -> None:
        """See `Schedule.check`."""
        for stage, number in enumerate(shape.replicas):
            if shape.num_micro_batches % number:
                raise InvalidArgument(
                    f"{self.name}: num_micro_batches={shape.num_micro_batches}; stage {stage} has {number} "
                    "replicas, expected a multiple"
                )

    def order(self, shape: PipelineShape, rank: int, step: int) -> list[Action]:
        """See `Schedule.order`."""
        workers = _workers(shape, rank)
        per_step = [worker.per_step for worker in workers]
        assert len(set(per_step)) == 1  # a rank with several stages has no replicas
        slots = range(step * per_step[0], (step + 1) * per_step[0])
        return [each for slot in slots for worker in workers for each in self._slot(worker, slot, True)]

    def rest(self, shape: PipelineShape, rank: int, num_steps: int) -> list[Action]:
        """See `Schedule.rest`."""
        workers = _workers(shape, rank)
        end = num_steps * workers[0].per_step
        slots = range(end, end + max(worker.depth for worker in workers))
        return [
            action
            for slot in slots
            for worker in workers
            if slot < end + worker.depth
            for action in self._slot(worker, slot, False)
        ]

    def _slot(self, worker: "_Worker", slot: int, has_forward: bool) -> Iterator[Action]:
        if has_forward:
            yield Action(
                Kind.FORWARD, worker.stage, worker.micro_batch(slot), self.version_read(worker, slot)
            )
        if (place := slot - worker.depth) >= 0:
            version = self.version_read(worker, place)
            yield Action(Kind.BACKWARD, worker.stage, worker.micro_batch(place), version)
            yield from self._update_after(worker, place)

    def _update_after(self, worker: "_Worker", place: int) -> Iterator[Action]:
        """Return the actions after the backward of the worker's micro-batch at `place`."""
        made = self.version_made(worker, place)
        if made is None:
            return
        if worker.shape.replicas[worker.stage] > 1:
            yield Action(Kind.REDUCE, worker.stage, version=made)
        for tie, stages in enumerate(worker.shape.ties):
            if worker.stage in stages:
                yield Action(Kind.REDUCE_TIED, tie, version=made)
        # Versions are read in order, so the next backward reads the oldest.
        keep_from = self.version_read(worker, place + 1)
        yield Action(Kind.UPDATE, worker.stage, version=made, keep_from=keep_from)

    @abc.abstractmethod
    def version_read(self, worker: "_Worker", place: int) -> int:
        """Return the version of the weights for the micro-batch in that place of the worker's own."""

    @abc.abstractmethod
    def version_made(self, worker: "_Worker", place: int) -> int | None:
        """Return the version of the weights that is made after its backward; None: none is."""


@dataclass(frozen=True)
class _Worker:
    """A replica of a stage.

    Attributes:
        per_step: how many micro-batches of a step it has.
        depth: how many forwards it is ahead of its backwards.
    """

    shape: PipelineShape
    stage: int
    replica: int

    @property
    def per_step(self) -> int:
        return self.shape.num_micro_batches // self.shape.replicas[self.stage]

    @property
    def depth(self) -> int:
        return self.shape.depth(self.stage)

    def micro_batch(self, place: int) -> int:
        """Return the micro-batch that is in that place of its own."""
        return self.replica + place * self.shape.replicas[self.stage]


def _workers(shape: PipelineShape, rank: int) -> list[_Worker]:
    return [_Worker(shape, stage, shape.ranks[stage].index(rank)) for stage in shape.stages_of(rank)]


@dataclass(frozen=True)
class PipeDream(Stashing):
    """Asynchronous 1F1B with weight stashing: each micro-batch is a minibatch with its own update.

    The backward of a micro-batch uses the weights that its forward has used. With n stages, counted from 0,
    and w_s(t) the weights of stage s after t updates:

        w(t+1) = w(t) - lr * grad f( w_0(t-n+1), w_1(t-n+2), ..., w_{n-1}(t) )

    and with `vertical_sync` all stages read the version that the first stage had when the micro-batch
    entered:

        w(t+1) = w(t) - lr * grad f( w_0(t-n+1), w_1(t-n+1), ..., w_{n-1}(t-n+1) )

    where versions before the first are the first. Stage s keeps n - s versions of its weights, with
    `vertical_sync` each keeps n. Replicas of a stage take micro-batches in turn; an update averages one
    gradient of each replica. Narayanan et al. 2019, "PipeDream: Generalized pipeline parallelism for DNN
    training".

    Args:
        vertical_sync: whether all stages read the same version for a micro-batch.
    """

    vertical_sync: bool = False

    updates_each_micro_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_flag("PipeDream", "vertical_sync", self.vertical_sync)

    def check(self, shape: PipelineShape) -> None:
        """See `Schedule.check`."""
        super().check(shape)
        if shape.ties:
            raise InvalidArgument(
                "PipeDream: tied parameters need a schedule in which stages update together; take "
                "PipeDream2BW or one that flushes"
            )
        if self.vertical_sync and shape.has_replicas:
            raise InvalidArgument(
                "PipeDream: vertical_sync=True does not go with replicas, which update at other times than "
                "other stages"
            )

    def version_read(self, worker: _Worker, place: int) -> int:
        """Return the number of updates of the stage when forward of the micro-batch began.

        With `vertical_sync` it is that of the first stage.
        """
        return max(0, place - (worker.shape.depth(0) if self.vertical_sync else worker.depth))

    def version_made(self, worker: _Worker, place: int) -> int:
        """Return the number of the update that follows each backward."""
        return place + 1


@dataclass(frozen=True)
class PipeDream2BW(Stashing):
    """Double-buffered weights: an update per step, with gradients that are one update old.

        w(t+1) = w(t) - lr * grad f( w(t-1) ),  w(-1) = w(0)

    where the gradient is that of the mean loss over the step's m micro-batches. Each stage keeps two versions
    of its weights, and m is at least the number of stages. Narayanan et al. 2021, "Memory-efficient
    pipeline-parallel DNN training".
    """

    def check(self, shape: PipelineShape) -> None:
        """See `Schedule.check`."""
        super().check(shape)
        for stage, number in enumerate(shape.replicas):
            if shape.num_micro_batches < number * (shape.depth(stage) + 1):
                raise InvalidArgument(
                    f"PipeDream2BW: num_micro_batches={shape.num_micro_batches}; two versions of the weights "
                    f"are enough for {number * (shape.depth(stage) + 1)} or more, the stages in a row"
                )
        for stages in shape.ties:
            ranks = [rank for stage in stages for rank in shape.ranks[stage]]
            if len(set(ranks)) != len(ranks):
                raise InvalidArgument(f"PipeDream2BW: the tied stages {stages} must be on different ranks")

    def version_read(self, worker: _Worker, place: int) -> int:
        """Return the number of updates up to the step before the last: one less than the newest version."""
        return max(0, place // worker.per_step - 1)

    def version_made(self, worker: _Worker, place: int) -> int | None:
        """Return the number of the update that follows the last backward of a step."""
        step, is_last = divmod(place + 1, worker.per_step)
        return step if is_last == 0 else None
