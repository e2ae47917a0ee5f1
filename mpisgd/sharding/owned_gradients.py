"""`OwnedGradients`: the gradients of shared parameters, each reduced into the memory of its owner."""

from collections.abc import Sequence

from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.options import ReductionOptions
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.sharding.shared_parameters import SharedParameters

__all__ = ["OwnedGradients"]


class OwnedGradients(GradientReducer):
    """Reduces gradients, and leaves those of a parameter with the rank of this host that updates it.

    Args:
        named: all parameters, with names.
        group: the ranks.
        options: how to reduce.
        shared: where they lie and which rank owns each.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        group: Group,
        options: ReductionOptions,
        shared: SharedParameters,
    ) -> None:
        super().__init__(named, group, options, self._sole_owners)
        self._shared = shared

    def _sole_owners(self) -> Sequence[int] | None:
        """Return the rank that needs each gradient, where it can be brought to one rank alone."""
        compressed = any(self.options.compression.changes(param.dtype) for param in self.params)
        return self._shared.owners if self._shared.one_host and not compressed else None

    def _unload(self, in_flight: InFlightReduction) -> list[int] | None:
        nonfinite = super()._unload(in_flight)
        self._shared.leave_gradients_with_owners()
        return nonfinite

    def are_with_owners(self) -> bool:
        """Return whether reduced gradients are with the ranks that own them, and were not reset since."""
        return self._shared.gradients_are_with_owners(self.holds_reduced)
