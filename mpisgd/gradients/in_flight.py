"""`InFlightReduction`: one reduction in flight: which gradients are complete, which buckets are launched."""

import contextlib
from collections.abc import Collection, Sequence

from torch import Tensor

from mpisgd.accelerator.gradient_streams import GradientStreams
from mpisgd.core.work import Work
from mpisgd.errors import MpisgdError
from mpisgd.gradients.bucket_plan import BucketPlan, BucketSlot
from mpisgd.gradients.finite import LateMarks
from mpisgd.gradients.gradient_flags import FlagsExchange

__all__ = ["InFlightReduction"]


class InFlightReduction:
    """The buckets of a plan, by their places in it, and what has become of each.

    Args:
        plan: what it follows; None where there is none.
        when: which reduction of the program it is.
        in_background: whether buckets are launched during backward, each when all its gradients are complete.
        note: what this rank tells the others with its gradients; see `FlagsExchange`.

    Attributes:
        launched: the work of each bucket that was launched; None for one that is complete.
        flags: of the gradients in them, in the same order, joined over the ranks as the buckets complete.
        late: exchanges of these that lack what a device has still to find out.
        held: whether the rest must wait for the end of backward.
        addresses: of the gradients that travel from where they lie.
        loaded: the memory of the buckets that have been brought there, in their order.
        streams: in which the gradients were computed.
        at_owners: the buckets that have been brought to the owners of their parts; the others are everyone's.
        unfreed: buckets that travel together, in the order of launching, whose gradients are still in memory.
        is_given_up: whether all ranks know that some have left this backward, and nothing more is sent in it.
        failure: why nothing can be reduced at its end.
    """

    def __init__(
        self, plan: BucketPlan | None = None, when: str = "", *, in_background: bool = False, note: int = 0
    ) -> None:
        self.plan = plan
        self.note = note
        self.when = when
        self.in_background = in_background
        self.slots: Sequence[BucketSlot] = () if plan is None else plan.slots
        self.launched: dict[int, Work | None] = {}
        self.flags: list[FlagsExchange] = []
        self.late: list[tuple[FlagsExchange, LateMarks]] = []
        self.held = False
        self.addresses: set[int] = set()
        self.loaded: list[Tensor] = []
        self.streams = GradientStreams()
        self.at_owners: set[int] = set()
        self.unfreed: list[tuple[int, ...]] = []
        self.is_given_up = False
        self.failure: MpisgdError | None = None
        self._complete: set[int] = set()
        self._missing: list[int] = []
        self._place_of: dict[int, int] = {}
        if in_background:
            self._missing = [len(slot.bucket.indices) for slot in self.slots]
            self._place_of = {i: at for at, slot in enumerate(self.slots) for i in slot.bucket.indices}

    @property
    def indices(self) -> list[int]:
        """The parameters of all buckets, in the order of these."""
        return [index for slot in self.slots for index in slot.bucket.indices]

    def was_launched(self, index: int) -> bool:
        """Return whether the bucket of this parameter was launched."""
        return self._place_of.get(index) in self.launched

    def complete(self, index: int) -> int | None:
        """Note that the gradient of a parameter is complete; return the bucket that is complete by that."""
        place = self._place_of.get(index)
        if place is None or index in self._complete:
            return None
        self._complete.add(index)
        self._missing[place] -= 1
        return None if self._missing[place] else place

    def next_complete(self) -> int | None:
        """Return the bucket to launch next, where they are launched in order, if its gradients are there."""
        place = len(self.launched)
        if self.held or place == len(self._missing) or self._missing[place]:
            return None
        return place

    def are_complete(self, places: Sequence[int]) -> bool:
        """Return whether the gradients of these buckets are all there, and they may be launched."""
        return not self.held and not any(self._missing[place] for place in places)

    def forget(self, places: Collection[int]) -> None:
        """Let go of the memory of buckets that have arrived."""
        for i, place in enumerate(self.launched):
            if place in places:
                self.loaded[i] = self.loaded[i][:0].clone()

    @property
    def latest(self) -> Work | None:
        """The work launched last; if that fails, the next one is dropped."""
        return next(reversed(self.launched.values()), None)

    def not_launched(self) -> list[int]:
        """Return the buckets that were not launched."""
        return [place for place in range(len(self.slots)) if place not in self.launched]

    def unreduced(self) -> list[Tensor]:
        """Return the memory of those buckets that were loaded and have come to nothing, once all is over."""
        arrived = [work is None or work.error is None for work in self.launched.values()]
        return [flat for i, flat in enumerate(self.loaded) if i >= len(arrived) or not arrived[i]]

    @property
    def has_arrived(self) -> bool:
        """Whether some bucket has, once all is over."""
        return any(work is None or work.error is None for work in self.launched.values())

    def wait(self) -> None:
        """Return when all that was launched is complete.

        Raises:
            MpisgdError: the first that went wrong; what came after it is not told again.
        """
        works = [work for work in self.launched.values() if work is not None]
        try:
            for work in works:
                work.wait()
        except MpisgdError:
            for work in works:
                with contextlib.suppress(MpisgdError):
                    work.wait()
            raise
