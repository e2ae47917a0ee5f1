"""`GradientSync`: what combines the gradients of the ranks, as those see it who decide when that is done."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from mpisgd.core.work import Work
from mpisgd.gradients.weight import Count

__all__ = ["GradientSync"]


class GradientSync:
    """Combines the gradients of the ranks when a window asks for it. This one leaves them on their rank.

    Attributes:
        params: the parameters whose gradients it combines; backward passes over others count for nothing.
        combines: whether it combines any.
        is_weighted: whether those of each rank count as much as it has examples; see `set_weighted`.
    """

    params: Sequence[Tensor] = ()
    combines = False
    is_weighted = False

    @property
    def combined_by(self) -> str:
        """How it combines them, in words."""
        return ""

    @property
    def contents(self) -> str:
        """Which parameters take part in the next reduction, in words."""
        return ""

    @property
    def sparse_dims(self) -> Mapping[int, int]:
        """How many sparse dimensions gradients had that were sparse, by parameter."""
        return {}

    def cover(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Take over another list of parameters."""

    def leave_out(self, indices: Collection[int]) -> None:
        """Leave the gradients of these to somebody else."""

    def set_weighted(self, weighted: bool) -> None:
        """Weight a mean of gradients from now on, or no more. Alike on all ranks; nothing is on its way."""

    def weigh(self, counts: Sequence[Count]) -> None:
        """Note what all ranks have computed the gradients of that are reduced next."""

    def note_pass(self, first_ready: int) -> None:
        """Note that a backward begins, whose first gradient is that of this parameter."""

    def begin(self, when: str) -> bool:
        """Get ready for a backward; return whether `ready` is to be called for each gradient."""
        return False

    def ready(self, index: int) -> None:
        """Note that the gradient of a parameter is complete."""

    @property
    def sent_last(self) -> Work | None:
        """What was sent last during the backward that is under way, if anything was."""
        return None

    def hold(self) -> None:
        """Send nothing more before `reduce`."""

    def forget_backward(self) -> None:
        """Forget a backward that was left by an exception."""

    def reduce(self, when: str, observed: Sequence[int] = (), *, in_step: bool = False) -> None:
        """Combine every gradient over the ranks."""

    def combine_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of all ranks together."""
        return loss

    def forget_reduced(self) -> None:
        """Note that all gradients were reset."""

    def why_not_again(self) -> str:
        """Return why what there is may not be reduced once more, "" if it may.

        The mean of means that all ranks have is the same again; a sum, or what only its owner has, is not.
        """
        return ""

    def check_unchanged(self, when: str) -> None:
        """Make sure that no rank has changed what others have as it was reduced. Collective if it can be."""
