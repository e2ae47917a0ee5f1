"""`Destination`: whose the combined gradients of a list of parameters become, everyone's or their owners'.

A reducer has one; it decides in which memory buckets travel, which of them travel together, and what the
parameters get when these have arrived.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from mpisgd.accelerator.runtime import on_device
from mpisgd.gradients.bucket_plan import BucketPlan, BucketSlot, make_slot
from mpisgd.gradients.bucketing import Bucket
from mpisgd.gradients.gradient_flags import DENSE
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.launcher import BucketLauncher

__all__ = ["Destination", "Everyone"]


class Destination(Protocol):
    """Whose combined gradients become.

    Attributes:
        how: what that adds to how they are combined, in words.
        rounds: whether dense gradients, or parameters, are rounded on their way though nothing compresses.
    """

    how: str
    rounds: bool

    @property
    def packing_order(self) -> Sequence[int] | None:
        """The order in which gradients are packed; None: that in which rank 0 observes them."""

    @property
    def storage_order(self) -> Sequence[int] | None:
        """The order in which the gradients of a bucket lie there; None: as they are packed."""

    @property
    def launches_early(self) -> bool:
        """Whether some are sent before backward is over though nothing else goes on; alike on all ranks."""

    def cover(self, launcher: BucketLauncher) -> bool:
        """Take over other parameters, those of `launcher`; return whether a plan is needed at once."""

    def make_slots(self, buckets: Sequence[Bucket]) -> list[BucketSlot]:
        """Return where buckets travel from, and what reduces them. Collective."""

    def follow(self, plan: BucketPlan) -> None:
        """Take over a new plan. Collective."""
        return

    def release(self) -> None:
        """Forget what the last reduction has left: the gradients were reset, or are made anew."""
        return

    def launch_complete(self, in_flight: InFlightReduction) -> None:
        """Send what is complete, in the order of the plan, during backward."""

    def launch_rest(self, in_flight: InFlightReduction) -> None:
        """Send what was not sent yet.

        In how many operations must not depend on this rank's backward: another one may have had none.
        """

    def unload(self, in_flight: InFlightReduction, place: int, flags: bytes) -> None:
        """Take what came out of a bucket. Collective.

        Args:
            in_flight: what it belongs to.
            place: of the bucket in its plan.
            flags: of its gradients, on any rank.
        """

    def arrived(self, in_flight: InFlightReduction, sparse: Collection[int]) -> None:
        """Note that all gradients have been taken. Collective.

        Args:
            in_flight: what has arrived.
            sparse: the parameters whose gradients are known to be sparse; more than those of the plan where
                it is out of date.
        """
        return

    def why_not_again(self) -> str:
        """See `GradientSync`."""


class Everyone(Destination):
    """Every rank gets all gradients; between hosts one bucket after the other, on a host all at once."""

    how = ""
    rounds = False
    launches_early = False
    packing_order: Sequence[int] | None = None
    storage_order: Sequence[int] | None = None
    _launcher: BucketLauncher

    def cover(self, launcher: BucketLauncher) -> bool:
        """See `Destination`."""
        self._launcher = launcher
        return False

    def make_slots(self, buckets: Sequence[Bucket]) -> list[BucketSlot]:
        """See `Destination`."""
        params, group = self._launcher.params, self._launcher.group
        compression = self._launcher.options.compression
        return [make_slot(b, [params[i] for i in b.indices], group, compression) for b in buckets]

    def launch_complete(self, in_flight: InFlightReduction) -> None:
        """See `Destination`."""
        while (place := in_flight.next_complete()) is not None:
            self._launcher.launch(in_flight, place)

    def launch_rest(self, in_flight: InFlightReduction) -> None:
        """See `Destination`; without overlap all of it is one operation."""
        rest = in_flight.not_launched()
        first_params = [self._launcher.params_of(in_flight.slots[place])[0] for place in rest]
        if self._launcher.overlaps or any(map(on_device, first_params)):
            for place in rest:
                self._launcher.launch(in_flight, place)
        elif rest:
            self._launcher.launch_together(in_flight, rest)

    def unload(self, in_flight: InFlightReduction, place: int, flags: bytes) -> None:
        """See `Destination`; None where no rank has a gradient."""
        slot = in_flight.slots[place]
        slot.storage.unload(self._launcher.params_of(slot), [bool(flag & DENSE) for flag in flags])

    def why_not_again(self) -> str:
        """See `Destination`."""
        return ""
