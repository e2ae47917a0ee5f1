"""`join`: a training goes on where ranks have unequal numbers of batches.

with mpisgd.join(optimizer):        with optimizer.join() as uneven:
    for x, y in loader:                 for x, y in loader:
        ...                                 uneven.next_batch(examples=len(x))
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from mpisgd.arguments import check_flag, check_positive, shown
from mpisgd.collectives.all_reduce import reduce_ahead
from mpisgd.collectives.barrier import barrier as barrier  # likewise
from mpisgd.collectives.objects import all_gather_object, broadcast_object
from mpisgd.core.group import Group
from mpisgd.core.owner import owned_by
from mpisgd.core.uneven_data import Told, UnevenData, refuse
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.uneven_window import Begun
from mpisgd.gradients.windows import EXCHANGE, windows_of
from mpisgd.job.lifecycle import group_or_world
from mpisgd.optim.participant import Participant, performers_of

__all__ = ["Join", "join"]


def join(
    *optimizers: torch.optim.Optimizer,
    group: Group | None = None,
    follow: Sequence[Any] | None = None,
    throw_on_early_termination: bool = False,
    enable: bool = True,
) -> "Join":
    """Return a context in which ranks may have unequal numbers of batches.

    Collective: all ranks of the group enter it. A rank that reaches the end of the block continues to take
    part in the operations of the others, with gradients of weight 0, until all ranks have reached it.
    Gradients are weighted by the examples of each rank, so that the ranks compute what one process computes
    on their joined batches. Parameters and optimizer state stay the same on all ranks.

    `mpisgd.all_reduce` and `mpisgd.barrier` may be called inside. A rank without data contributes the neutral
    element, and in a mean each rank has the weight of its examples. Other collectives raise an error.

    Args:
        optimizers: all optimizers that train inside, made by `DistributedOptimizer` with the same group.
        group: the ranks, if there are no optimizers; by default all processes of the job.
        follow: objects that count steps, such as schedulers and a GradScaler. At the end all ranks load their
            `state_dict()` from a rank that has trained longest. Required if the program has such objects.
        throw_on_early_termination: whether all ranks raise as soon as one has no more data.
        enable: False: do nothing; the ranks must then have equal numbers of batches.

    Raises:
        InvalidArgument: an option or a call that cannot be used inside; at the beginning on every rank, or at
            the call.
        CollectiveMismatch: ranks that have data do different things; raised on every rank.
        DataExhausted: see `throw_on_early_termination`; raised on every rank.

    Cost: a small all-gather before each reduction, step and collective, and one more in a reduction. Buckets
        are sent at the end of backward. If a rank has no more data and gradients were changed after their
        reduction, for example by torch's clipping, they are sent once more.
    """
    return Join(
        optimizers,
        group,
        follow,
        throws=check_flag("join", "throw_on_early_termination", throw_on_early_termination),
        enable=check_flag("join", "enable", enable),
    )


class Join:
    """The context that `join` returns: inside, the ranks may have unequal numbers of batches."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        group: Group | None,
        follow: Sequence[Any] | None,
        *,
        throws: bool,
        enable: bool,
    ) -> None:
        self._follow = None if follow is None else list(follow)
        for each in self._follow or ():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise InvalidArgument(f"join: follow has {shown(each)}, which has no state_dict()")
        self._optimizers, self._group = optimizers, group
        self._throws, self._enable = throws, enable
        self._participants: dict[int, Participant] = {}
        self._data: UnevenData | None = None

    def next_batch(self, *, examples: int) -> None:
        """Set the number of examples of this rank's next backward passes. All ranks call it, or none.

        Without it all batches have the same weight.
        """
        check_positive("next_batch", "examples", examples, whole=True)
        if self._data is None:
            return
        for each in self._participants.values():
            if each.synchronizer.training.options.op is ReduceOp.SUM:
                refuse("next_batch()", "op=SUM adds gradients up, and weights none")
            each.next_batch(examples)
        self._data.examples, self._data.is_given = examples, True

    # -- the block ----------------------------------------------------------------------------------

    def __enter__(self) -> "Join":
        if self._enable:
            self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._data is None:
            return
        try:
            if kind is None:
                self._data.follow()
                self._reduce_what_is_left(self._data)
        finally:
            data, self._data = self._data, None
            self._end(data)
        if kind is None:
            self._share_counts(data)

    def _begin(self) -> None:
        participants, group = self._find()
        self._check(participants, group)
        self._participants = {each.number: each for each in participants}
        performers = {**performers_of(self._participants), EXCHANGE: self._exchange}
        data = UnevenData(
            group, performers, lambda flat: reduce_ahead(group, flat, ReduceOp.SUM), throws=self._throws
        )
        for each in participants:
            each.enter(data, self._follow)
            data.names.update({id(param): (each.number, place) for place, param in enumerate(each.params)})
        windows_of(group).uneven, windows_of(group).inside = data, frozenset(self._participants)
        data.install()
        self._data = data

    def _end(self, data: UnevenData) -> None:
        data.remove()
        windows_of(data.group).uneven, windows_of(data.group).inside = None, ()
        for each in self._participants.values():
            each.leave()

    def _find(self) -> tuple[list[Participant], Group]:
        participants = []
        for optimizer in self._optimizers:
            make = getattr(optimizer, "participant", None)
            if make is None:
                raise InvalidArgument(
                    f"join: {type(optimizer).__name__} is no mpisgd.DistributedOptimizer, which knows "
                    "what a rank without data does"
                )
            participants.append(make())
        groups = {each.synchronizer.training.group for each in participants}
        if len(groups) > 1 or (groups and self._group not in (None, *groups)):
            raise InvalidArgument("join: the optimizers have different groups; join those of each by itself")
        return participants, groups.pop() if groups else group_or_world(self._group)

    def _check(self, participants: Sequence[Participant], group: Group) -> None:
        """Raise where something does not go inside on some rank. Collective."""
        problems = [why for each in participants if (why := each.why_not)]
        inside = {each.number for each in participants}
        if group.queue.uneven is not None:
            raise InvalidArgument("join: this rank is inside join() already; make one of both")
        follows = None if self._follow is None else [type(each).__name__ for each in self._follow]
        text = f"optimizers {sorted(inside)}, follow={follows}, throw_on_early_termination={self._throws}"
        told: list[Any] = [None] * group.size
        with owned_by(None):
            all_gather_object(told, (text, problems), group)
        found = [f"rank {rank}: {each[0]}" for rank, (_, each) in zip(group.ranks, told, strict=True) if each]
        if found:
            _raise_on_every_rank(f"join: {found[0]}")
        if len({each for each, _ in told}) > 1:
            lines = [f"  rank {rank}: {each}" for rank, (each, _) in zip(group.ranks, told, strict=True)]
            _raise_on_every_rank("join: the ranks have given different arguments:\n" + "\n".join(lines))

    # -- a rank without data ------------------------------------------------------------------------

    def _exchange(self, told: Told, begun: dict[int, Begun]) -> None:
        for number, each in self._participants.items():
            if each.window.uneven is not None and number in begun:
                each.window.uneven.others = begun[number]
        assert self._data is not None
        windows_of(self._data.group).take_part(self._data.group)

    # -- the end ------------------------------------------------------------------------------------

    def _reduce_what_is_left(self, data: UnevenData) -> None:
        """Reduce what was accumulated in windows that nobody has filled: a step after the block takes it."""
        for number in sorted(self._participants):
            window = self._participants[number].window
            if not window.gradients.combines or window.uneven is None:
                continue
            told = data.gather_objects((window.uneven.count.passes, window.begun))
            if left := [begun for passes, begun in told if passes]:
                window.uneven.others = left[0]
                with data.act("reduce"):
                    window.reduce()

    def _share_counts(self, data: UnevenData) -> None:
        """Let all have what keeps count, settings and gradients of one that has trained longest. Collective.

        Those that ran out of data before do not know whether gradients were reset after the last step.
        """
        if data.last is None:
            return
        src = data.group.ranks[data.last.first]
        mine = None
        if data.group.rank == data.last.first:
            settings = {number: each.settings for number, each in self._participants.items()}
            begins = {number: each.window.is_first for number, each in self._participants.items()}
            mine = settings, [each.state_dict() for each in self._follow or ()], begins
        with owned_by(None):
            settings, states, begins = broadcast_object(mine, src, data.group)
        if data.group.rank != data.last.first:
            for number, each in self._participants.items():
                each.take_settings(settings[number])
            for each, state in zip(self._follow or (), states, strict=True):
                each.load_state_dict(state)
        was_short = data.last.examples[data.group.rank] == 0
        for number, participant in sorted(self._participants.items()):
            participant.take_gradients(begins[number], data.last.first, takes=was_short)


def _raise_on_every_rank(text: str) -> None:
    error = InvalidArgument(text)
    error.on_every_rank = True
    raise error
