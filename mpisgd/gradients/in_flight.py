"""`InFlightReduction`: one reduction in flight: which gradients are complete, which buckets are launched."""

import contextlib
from collections.abc import Sequence

from torch import Tensor

from mpisgd.core.work import Work
from mpisgd.errors import MpisgdError
from mpisgd.gradients.kinds import KindsExchange
from mpisgd.gradients.plan import BucketSlot, Plan

__all__ = ["InFlightReduction"]


class InFlightReduction:
    """The buckets of a plan, launched in its order, each when all its gradients are complete.

    Args:
        plan: what it follows; None where there is none.
        when: which reduction of the program it is.
        in_background: whether the queue's thread does the work.

    Attributes:
        launched: the work of each bucket that was launched; None for one that is complete.
        kinds: of the gradients in them, in the same order, joined over the ranks as the buckets complete.
        held: whether the rest must wait for the end of backward.
        addresses: of the gradients that travel from where they lie.
        loaded: the memory of the buckets that have been brought there, in their order.
    """

    def __init__(self, plan: Plan | None = None, when: str = "", *, in_background: bool = False) -> None:
        self.plan = plan
        self.when = when
        self.in_background = in_background
        self.launched: list[Work | None] = []
        self.kinds: list[KindsExchange] = []
        self.held = False
        self._slots = () if plan is None else plan.slots
        self.addresses: set[int] = set()
        self.loaded: list[Tensor] = []
        self._complete: set[int] = set()
        self._missing: list[int] = []
        self._place_of: dict[int, int] = {}
        if in_background:
            self._missing = [len(slot.bucket.indices) for slot in self._slots]
            self._place_of = {i: at for at, slot in enumerate(self._slots) for i in slot.bucket.indices}

    def was_launched(self, index: int) -> bool:
        """Return whether the bucket of this parameter was launched."""
        return self._place_of.get(index, len(self.launched)) < len(self.launched)

    def complete(self, index: int) -> None:
        """Note that the gradient of a parameter is complete."""
        if index in self._place_of and index not in self._complete:
            self._complete.add(index)
            self._missing[self._place_of[index]] -= 1

    def next_complete(self) -> BucketSlot | None:
        """Return the next bucket to launch, if its gradients are complete."""
        place = len(self.launched)
        if self.held or place == len(self._missing) or self._missing[place]:
            return None
        return self._slots[place]

    @property
    def latest(self) -> Work | None:
        """The work launched last; if that fails, the next one is dropped."""
        return self.launched[-1] if self.launched else None

    def not_launched(self) -> Sequence[BucketSlot]:
        """Return the buckets that were not launched."""
        return self._slots[len(self.launched) :]

    def unreduced(self) -> list[Tensor]:
        """Return the memory of those buckets that were loaded and have come to nothing, once all is over."""
        arrived = [work is None or work.error is None for work in self.launched]
        return [flat for i, flat in enumerate(self.loaded) if i >= len(arrived) or not arrived[i]]

    def wait(self) -> None:
        """Return when all that was launched is complete.

        Raises:
            MpisgdError: the first that went wrong; what came after it is not told again.
        """
        works = [work for work in self.launched if work is not None]
        try:
            for work in works:
                work.wait()
        except MpisgdError:
            for work in works:
                with contextlib.suppress(MpisgdError):
                    work.wait()
            raise
