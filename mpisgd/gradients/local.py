"""`LocalGradients`: gradients that stay on their rank, for strategies whose ranks have different models."""

from collections.abc import Mapping, Sequence

from torch import Tensor

__all__ = ["LocalGradients"]


class LocalGradients:
    """Combines nothing; see `mpisgd.gradients.accumulation.GradientSync`."""

    sums = False

    def __init__(self) -> None:
        self.params: Sequence[Tensor] = ()  # there is nothing to watch

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Do nothing."""

    def begin(self, when: str) -> bool:
        """Return False: nothing is sent."""
        return False

    def ready(self, index: int) -> None:
        """Do nothing."""

    def hold(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def reduce(self, when: str, observed: Sequence[int] = ()) -> None:
        """Do nothing."""

    def combine_loss(self, loss: Tensor) -> Tensor:
        """Return this rank's own loss."""
        return loss

    def are_with_owners(self) -> bool:
        """Return False."""
        return False

    def holds_reduced(self) -> bool:
        """Return False."""
        return False

    def mark(self) -> None:
        """Do nothing."""

    def kept_since_mark(self, num_added: Mapping[int, int]) -> bool:
        """Return False."""
        return False
