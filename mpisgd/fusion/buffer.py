"""`FusionBuffer`: the memory in which the gradients of one bucket lie side by side and travel.

    flat   | grad a | pad | grad b | pad | grad c | a? b? c? | a~ b~ c~ |
             views[0]       views[1]       views[2]  dense      sparse

The flags at the end say which gradients exist here, dense or sparse. They are summed with the rest, in the
same message: what is not zero afterwards exists on some rank. So a parameter that no rank used keeps no
gradient, as in one process, at the price of two numbers per parameter.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.fusion.bucketing import Bucket

__all__ = ["FusionBuffer", "num_elements"]


class FusionBuffer:
    """Flat storage of one bucket.

    Attributes:
        bucket: the plan it follows.
        flat: [numel + flags], what travels.
        views: one tensor per parameter, of its shape, inside `flat`.
    """

    def __init__(self, bucket: Bucket, params: Sequence[Tensor], flat: Tensor) -> None:
        """Lay out `flat`, of `num_elements(bucket)` elements, for the parameters of `bucket.indices`."""
        self.bucket = bucket
        count = len(params)
        self.flat = flat.zero_()
        self._layouts = [_layout_of(param) for param in params]
        self.views = [
            _window(self.flat, offset, *layout)
            for offset, layout in zip(bucket.offsets, self._layouts, strict=True)
        ]
        self._addresses = [view.data_ptr() for view in self.views]
        self._dense = self.flat[bucket.numel : bucket.numel + count]
        self._sparse = self.flat[bucket.numel + count :]

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Return whether `params` still have the dtype and the shapes that this was made for."""
        return all(
            param.dtype == self.flat.dtype and param.shape == shape
            for param, (shape, _) in zip(params, self._layouts, strict=True)
        )

    def absorb(self, grads: Sequence[Tensor | None]) -> None:
        """Bring this rank's gradients into `flat`, each unless it lies there already, and set the flags.

        A gradient that is missing, or sparse and travels apart, counts as zeros.
        """
        exists = [grad is not None and not grad.is_sparse for grad in grads]
        self._renew_displaced()
        moving = [
            (view, self._apart(grad))
            for view, grad, here in zip(self.views, grads, exists, strict=True)
            if here and grad is not None and grad is not view
        ]
        if moving:
            torch._foreach_copy_([view for view, _ in moving], [grad for _, grad in moving])
        if all(exists):
            self._dense.fill_(1)
            self._sparse.zero_()
            return
        torch._foreach_zero_([view for view, here in zip(self.views, exists, strict=True) if not here])
        self._dense.copy_(torch.tensor(exists))
        self._sparse.copy_(torch.tensor([grad is not None and grad.is_sparse for grad in grads]))

    def _renew_displaced(self) -> None:
        """Make a new view where the old one lies elsewhere by now.

        `p.grad.data = other` does that, and so does `model.half()` or `model.to(memory_format=...)`.
        """
        for place, (view, address) in enumerate(zip(self.views, self._addresses, strict=True)):
            if view.data_ptr() != address:
                self.views[place] = _window(self.flat, self.bucket.offsets[place], *self._layouts[place])

    def _apart(self, grad: Tensor) -> Tensor:
        """Return `grad`, or a copy of one that the program has put together from `flat`, as `p.grad.T` is.

        It must be read as a whole before anything is written there.
        """
        inside = grad.data_ptr() - self.flat.data_ptr()
        return grad.clone() if 0 <= inside < self.flat.nbytes else grad

    def dense_somewhere(self) -> list[bool]:
        """Return, after the reduction, for each parameter whether any rank had a dense gradient."""
        present: list[bool] = (self._dense != 0).tolist()
        return present

    def sparse_somewhere(self) -> list[int]:
        """Return, after the reduction, the parameters (by place) of which some rank had a sparse gradient."""
        if not self._sparse.any():
            return []
        return [place for place, flag in enumerate(self._sparse.tolist()) if flag]


def num_elements(bucket: Bucket) -> int:
    """Return how many elements the flat storage of a bucket has, flags included."""
    return bucket.numel + 2 * len(bucket.indices)


def _window(flat: Tensor, offset: int, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """Return a tensor of this shape and layout on the storage of `flat`.

    It is a tensor of its own and not a slice: it has its own version counter, so that writing to one
    gradient is no write to the others as far as autograd can see.
    """
    own = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return own.set_(flat.untyped_storage(), flat.storage_offset() + offset, shape, stride)


def _layout_of(param: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Return the shape of `param` and its strides, contiguous ones where it has gaps."""
    stride = param.stride() if _is_dense(param) else torch.empty(param.shape, device="meta").stride()
    return param.shape, stride


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill `tensor.numel()` places without gaps, in whatever order."""
    expected = 1
    for length, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
