"""`InPlaceGradient`: a gradient that is large enough to travel alone, from where autograd has put it.

Copying it into a fusion buffer would cost as much as reducing it, and its memory twice. So it is reduced in
place; what backward makes anew next time is reduced there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.gradients.bucketing import Bucket
from mpisgd.gradients.fusion_buffer import StridedLayout, layout_of
from mpisgd.gradients.gradient_flags import flag_of

__all__ = ["ALONE", "InPlaceGradient", "num_uses"]


def num_uses(tensor: Tensor) -> int:
    """Return how many there are of the memory of `tensor`: of tensors on it, and this look at it."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


ALONE = num_uses(torch.empty(1))


class InPlaceGradient:
    """The bucket of one parameter.

    Attributes:
        bucket: the plan it follows.
        flat: [bucket.numel], what travels: the gradient's memory from `load` to `unload`.
    """

    def __init__(self, bucket: Bucket, param: Tensor) -> None:
        self.bucket = bucket
        self._layout, self._stride = layout_of(param), param.stride()
        self._dtype = param.dtype
        self._device = param.device
        self._grad: Tensor | None = None

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Return whether the parameter still has the dtype, place and layout that this was made for."""
        (param,) = params
        alike = param.dtype == self._dtype and param.device == self._device
        return alike and param.shape == self._layout.shape and param.stride() == self._stride

    @property
    def layouts(self) -> Sequence[StridedLayout]:
        """How the gradient lies there."""
        return [self._layout]

    @property
    def flat(self) -> Tensor:
        """What travels."""
        assert self._grad is not None
        return self._grad.as_strided((self.bucket.numel,), (1,))

    def load(self, grads: Sequence[Tensor | None], used: set[int]) -> bytes:
        """Take this rank's gradient as it lies, or a copy that lies as its parameter does; return its flag.

        One that is missing, or sparse and travels apart, counts as zeros.

        Args:
            grads: the gradient.
            used: addresses of the gradients that travel from where they lie; grows. A tensor that the
                program uses as the gradient of two parameters would be reduced in place once for each.
        """
        (grad,) = grads
        if grad is not None and not grad.is_sparse and self._is_ready(grad) and grad.data_ptr() not in used:
            used.add(grad.data_ptr())
            self._grad = grad
        else:
            room = torch.empty_strided(*self._layout, dtype=self._dtype, device=self._device)
            self._grad = room.zero_() if grad is None or grad.is_sparse else room.copy_(grad)
        return bytes([flag_of(grad)])

    def _is_ready(self, grad: Tensor) -> bool:
        """Return whether `grad` lies as it must on all ranks, and nobody minds its being changed.

        Autograd minds if it has a graph of its own (`create_graph=True`), and if a part of backward that is
        still to come reads this memory: of `x + p[None]` the gradient of p is a view of that of x. One
        storage may also hold the gradients of several parameters, of which each would be reduced where the
        others lie.
        """
        strides = zip(grad.shape, grad.stride(), self._layout.stride, strict=True)
        return (
            grad.dtype == self._dtype
            and all(length == 1 or mine == wanted for length, mine, wanted in strides)
            and not grad.requires_grad
            and not (grad.is_conj() or grad.is_neg())
            and grad.untyped_storage().nbytes() == grad.nbytes
            and num_uses(grad) == ALONE
        )

    def unload(self, params: Sequence[Tensor], exists: Sequence[bool]) -> None:
        """Make the reduced gradient that of its parameter, or None if no rank has one."""
        (param,) = params
        grad, self._grad = self._grad, None
        if not exists[0]:
            param.grad = None
            return
        assert grad is not None
        if param.grad is not grad:
            param.grad = grad

    def release(self) -> None:
        """Forget a gradient that was loaded and does not become that of its parameter."""
        self._grad = None
