"""`ReducedGradients`: whether parameters still have the gradients that a reduction has left in them.

What has been summed must not be summed once more, whatever backward adds to it. A version counter alone does
not tell: it counts a reset, `grad.zero_()`, as it counts clipping. So a changed gradient is looked at before
backward adds to it: what was reset is zero.

    reduced R     zero_grad, or another tensor      forgotten: what comes is new
                  still R, or R changed             what comes is added to R
"""

from collections.abc import Sequence

from torch import Tensor
from torch.utils.weak import TensorWeakRef

__all__ = ["ReducedGradients"]


class ReducedGradients:
    """Remembers which tensors a reduction has left as gradients; keeps none of them alive."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[TensorWeakRef, int]] = {}  # by parameter: the tensor, and its version

    def __bool__(self) -> bool:
        return bool(self._left)

    def note(self, params: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Take what these parameters have now for reduced, and nothing else."""
        self._left.clear()
        self.note_further(params, indices)

    def note_further(self, params: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Do the same, and forget nothing."""
        for index in indices:
            if (grad := params[index].grad) is not None:
                self._left[index] = TensorWeakRef(grad), grad._version

    def forget(self) -> None:
        """Take everything for new: gradients were reset."""
        self._left.clear()

    def were_changed(self, params: Sequence[Tensor]) -> bool:
        """Return whether any of them has been replaced or written to."""
        return any(
            (grad := params[index].grad) is None or grad is not ref() or grad._version != version
            for index, (ref, version) in self._left.items()
        )

    def remain(self, params: Sequence[Tensor], first_ready: int = -1) -> bool:
        """Return whether any of them is still there, changed or not, and was not set to zero.

        Args:
            params: their parameters.
            first_ready: the one to which the backward that begins has added already; of the others it has
                not. Of this one nobody can tell a reset from another change, so the others decide.
        """
        changed = []
        for index, (ref, version) in self._left.items():
            grad = params[index].grad
            if grad is None or grad is not ref():
                continue
            if grad._version == version + (index == first_ready):
                return True
            if index != first_ready:
                changed.append(grad)
        return any(map(_has_nonzero, changed))

    def forget_unless_they_remain(self, params: Sequence[Tensor], first_ready: int) -> None:
        """Note that a backward begins: what it adds to nothing reduced is new."""
        if self._left and not self.remain(params, first_ready):
            self._left.clear()


def _has_nonzero(grad: Tensor) -> bool:
    values = grad._values() if grad.is_sparse else grad
    return bool(values.count_nonzero())
