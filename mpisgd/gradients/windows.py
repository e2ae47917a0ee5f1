"""`GroupWindows`: the accumulation windows of a group's optimizers, where there are several.

One backward may reach the parameters of several optimizers, and on each rank those of other ones: the loss of
one rank uses a part of the model that the loss of another does not. So at the end of a backward all ranks
tell each other, in one exchange, which optimizers it has reached, and all of them reduce the gradients of
all of these, in the order in which the optimizers were made. A rank that comes to `step()` without having had
that backward takes part from there:

    rank 0   backward reaches A      exchange A, -   reduce A   reduce B   A.step()   B.step()
    rank 1   backward reaches B      exchange -, B   reduce A   reduce B   A.step()   B.step()
    rank 2   no backward, A.step()   exchange -, -   reduce A   reduce B   goes on    B.step()

A group with one optimizer has none of this: whoever comes, comes to that one.
"""

import gc
import weakref
from collections.abc import Collection, Mapping, MutableMapping
from typing import Protocol

from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.owner import Owner, owned_by
from mpisgd.core.uneven_data import UnevenData
from mpisgd.core.work import Work
from mpisgd.errors import CollectiveMismatch, InvalidArgument
from mpisgd.gradients.gradient_flags import FlagsExchange
from mpisgd.gradients.uneven_window import Begun

__all__ = ["GroupWindows", "Window", "windows_of"]

# What a rank tells of each window:
REACHED = 1  # by the backward that has ended here
NOT_AWAITED = 2  # by this rank, in a `step()`
MUTED = 4  # inside `no_sync()`
GONE = 8  # there is no such optimizer any more
# and, first, of itself:
AFTER_BACKWARD, WAITS = 1, 2
EXCHANGE = "exchange"  # its name for ranks without data


class Window(Protocol):
    """What a window is to others of its group."""

    @property
    def owner(self) -> Owner:
        """Of its operations."""

    @property
    def when(self) -> str:
        """Which reduction the next one is."""

    @property
    def contents(self) -> str:
        """Which of its parameters take part in it, in words."""

    @property
    def is_active(self) -> bool:
        """Whether it reduces anything by itself."""

    @property
    def is_muted(self) -> bool:
        """Whether nothing is to be sent now."""

    @property
    def latest_backward(self) -> int:
        """The number of the latest backward that has reached it."""

    @property
    def sent_last(self) -> Work | None:
        """What was sent last during the backward that is under way, if anything was."""

    def forget_backward(self) -> None:
        """Forget the backward that is under way, and what became of what was sent."""

    @property
    def num_reductions(self) -> int:
        """How many there have been."""

    def count_pass(self, *, in_step: bool) -> None:
        """Count a backward pass, and reduce if it fills the window. Collective then."""

    def reduce(self, *, in_step: bool) -> None:
        """Reduce what there is. Collective."""

    @property
    def begun(self) -> Begun:
        """What ranks without data must know of the next reduction."""


class GroupWindows:
    """Those of one group.

    Attributes:
        active: the owners of those that any rank may still use, in their order; the same on all ranks.
        uneven: what some ranks may run out of data in; None elsewhere.
        inside: the numbers of the optimizers that are in it.
    """

    def __init__(self) -> None:
        self.active: list[Owner] = []
        self.uneven: UnevenData | None = None
        self.inside: Collection[int] = ()
        self._num_joined = 0
        self._windows: dict[int, weakref.ref[Window]] = {}
        self._latest = -1  # the backward whose end was dealt with last

    def join(self, window: Window, group: Group) -> None:
        """Add the window of an optimizer that was just made. Collective, but for the first one.

        What an optimizer leaves behind that was forgotten is gone on some ranks and not on others. So they
        agree here on which there are, and until the next one is made. One that only a reference cycle keeps
        is collected before.
        """
        self._num_joined += 1
        if any(other.is_active for other in self._alive().values() if other is not window):
            gc.collect()
        self._windows[window.owner.number] = weakref.ref(window)
        mine = {number: window.owner for number, window in self._alive().items() if window.is_active}
        self.active = [owner for _, owner in sorted(mine.items())]
        if self._num_joined > 1 and group.size > 1:
            everyones: list[Mapping[int, Owner]] = []
            group.queue.run(
                Operation("gradients", extra="which optimizers there are"),
                lambda: everyones.extend(group.queue.communicator.all_gather_object(mine)),
            )
            union = {number: owner for theirs in everyones for number, owner in theirs.items()}
            self.active = [owner for _, owner in sorted(union.items())]

    def leave(self, window: Window) -> None:
        """Forget a window that goes on with another group."""
        self._windows.pop(window.owner.number, None)

    def _alive(self) -> dict[int, Window]:
        alive = {number: reference() for number, reference in self._windows.items()}
        return {number: window for number, window in alive.items() if window is not None}

    @property
    def are_several(self) -> bool:
        """Whether a backward may reach more than one; the same on all ranks."""
        return len(self.active) > 1

    # -- one exchange after the other ---------------------------------------------------------------

    def end_backward(self, number: int, group: Group) -> None:
        """Reduce what the backward of this number has filled on any rank. Collective.

        Each window that it has reached here calls this; the first call does it for all.
        """
        if number == self._latest:
            return
        self._latest = number
        alive = self._alive()
        # One that is gone here may live on elsewhere: it must count alike on all ranks.
        if all(owner.number in alive and alive[owner.number].is_muted for owner in self.active):
            return
        reached = {n for n, w in alive.items() if w.latest_backward == number and not w.is_muted}
        try:
            self._exchange(group, alive, reached=reached)
        except CollectiveMismatch:
            for each in reached:
                alive[each].forget_backward()
            raise

    def flush(self, window: Window, group: Group, *, in_step: bool) -> None:
        """Have the gradients of a window reduced that this rank needs now, with those of others that come.

        Others may be at the end of a backward that this rank has not had, and have more of them before them:
        this rank counts these with them, until the window has been reduced.
        """
        before = window.num_reductions
        while window.num_reductions == before:
            if not self._exchange(group, self._alive(), awaited=window.owner.number, in_step=in_step):
                # Everybody waits, and not for the same: these operations are compared, and differ.
                window.reduce(in_step=in_step)

    def take_part(self, group: Group) -> None:
        """Take part in an exchange on a rank without data, which waits for nothing. Collective."""
        nothing = bytes(1 + len(self.active))
        self._tell_and_reduce(group, self._alive(), nothing)

    def _exchange(
        self,
        group: Group,
        alive: Mapping[int, Window],
        *,
        reached: Collection[int] = (),
        awaited: int = -1,
        in_step: bool = False,
    ) -> bool:
        """Do an exchange, of which ranks without data are told before; see `_tell_and_reduce`."""
        mine = [
            REACHED * (owner.number in reached)
            | NOT_AWAITED * (owner.number != awaited)
            | (MUTED * alive[owner.number].is_muted if owner.number in alive else GONE)
            for owner in self.active
        ]
        bits = bytes([WAITS if awaited >= 0 else AFTER_BACKWARD, *mine])
        if self.uneven is None:
            return self._tell_and_reduce(group, alive, bits, reached, awaited, in_step=in_step)
        with self.uneven.act(EXCHANGE, detail=lambda: {n: w.begun for n, w in alive.items()}):
            return self._tell_and_reduce(group, alive, bits, reached, awaited, in_step=in_step)

    def _tell_and_reduce(
        self,
        group: Group,
        alive: Mapping[int, Window],
        mine: bytes,
        reached: Collection[int] = (),
        awaited: int = -1,
        *,
        in_step: bool = False,
    ) -> bool:
        """Tell each other of all windows, and reduce those that are full, or that all wait for. Collective.

        Returns:
            Whether anything was reduced or counted, or may be the next time.

        Raises:
            CollectiveMismatch: on every rank; a window that has been reached is muted or gone on some rank.
        """
        told = FlagsExchange(mine, group)
        with owned_by(None):  # each rank may come from another one
            what = Operation("gradients", extra="which optimizers a backward has reached")
            # Where what was sent during backward has failed, it has on all ranks, and they raise that.
            sent = [alive[number].sent_last for number in reached]
            latest = next((work for work in sent if work is not None), None)
            named = [alive[number] for number in {*reached, awaited} if number in alive]
            group.queue.run(
                what,
                told.finish,
                before=told.before,
                after=latest,
                detail=lambda: "\n".join(f"{w.owner}, {w.when}, {w.contents}" for w in named),
            )
        assert told.joined is not None
        everyones = dict(zip(self.active, told.joined[1:], strict=True))
        self._check(everyones)
        progressed = bool(told.joined[0] & AFTER_BACKWARD)
        for owner, bits in everyones.items():
            if bits & REACHED:
                alive[owner.number].count_pass(in_step=in_step)
            elif not bits & NOT_AWAITED:
                progressed = True
                alive[owner.number].reduce(in_step=in_step)
        return progressed

    def _check(self, everyones: Mapping[Owner, int]) -> None:
        """Raise where one that a backward has reached on some rank cannot be reduced on another."""
        for owner, bits in everyones.items():
            is_used = bits & REACHED or not bits & NOT_AWAITED
            if is_used and self.uneven is not None and owner.number not in self.inside:
                error = InvalidArgument(
                    f"join: {owner} trains with the same ranks, and is not inside: join all of them together"
                )
                error.on_every_rank = True
                raise error
            if bits & REACHED and bits & GONE:
                raise CollectiveMismatch(
                    f"a backward has reached parameters of {owner} on some rank, and another rank has this "
                    "optimizer no more; keep it on all ranks, or delete it on all of them"
                )
            if bits & REACHED and bits & MUTED:
                raise CollectiveMismatch(
                    f"a backward has reached parameters of {owner} on some rank, and another rank is inside "
                    "its no_sync(); enter no_sync() on all ranks, or on none"
                )


_of_groups: MutableMapping[Group, GroupWindows] = weakref.WeakKeyDictionary()


def windows_of(group: Group) -> GroupWindows:
    """Return the windows of a group."""
    if group not in _of_groups:
        _of_groups[group] = GroupWindows()
    return _of_groups[group]
