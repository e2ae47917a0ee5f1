"""`FusionBuffer`: the memory in which the gradients of one bucket lie side by side and travel.

flat   | grad a | pad | grad b | pad | grad c |
views[0]       views[1]       views[2]
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.gradients.bucketing import Bucket
from mpisgd.gradients.gradient_flags import ALL_DENSE, DENSE, flags_of

__all__ = ["FusionBuffer", "StridedLayout", "flat_view", "laid_out", "layout_of", "window"]


class StridedLayout(NamedTuple):
    """Shape and strides of a tensor whose elements fill `numel` places without gaps, in some order."""

    shape: torch.Size
    stride: tuple[int, ...]


def layout_of(param: Tensor) -> StridedLayout:
    """Return how a gradient lies: as its parameter, so that optimizers walk both alike, but without gaps."""
    return StridedLayout(param.shape, torch.empty_like(param, device="meta").stride())


def laid_out(tensor: Tensor, param: Tensor) -> Tensor:
    """Return a tensor of a parameter's shape as it is, or a copy of it, such that it lies as the gradient.

    Fused optimizers walk a parameter, its gradient and its state in the order of memory, whatever their
    strides: elements would be updated by the gradients of others. What is sparse is returned as it is.
    """
    if tensor.layout is not torch.strided or tensor.stride() == (stride := layout_of(param).stride):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def shape_in_memory(param: Tensor) -> torch.Size:
    """Return the shape of a gradient with its dimensions in the order of memory, the outermost first."""
    stride = layout_of(param).stride
    return torch.Size(param.shape[dim] for dim in sorted(range(param.dim()), key=lambda dim: -stride[dim]))


def window(flat: Tensor, offset: int, layout: StridedLayout) -> Tensor:
    """Return a tensor of this layout on the storage of `flat`, `offset` elements after its beginning.

    It is a tensor of its own and not a slice: it has its own version counter, so that writing to one
    gradient is no write to the others as far as autograd can see.
    """
    own = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return own.set_(flat.untyped_storage(), flat.storage_offset() + offset, *layout)


def flat_view(tensor: Tensor, layout: StridedLayout) -> Tensor:
    """Return the elements of a tensor, [numel], in the order of a layout; a copy where it has another one."""
    tensor = tensor.detach()
    if tensor.stride() != layout.stride:
        tensor = torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class FusionBuffer:
    """Flat storage of one bucket.

    Args:
        bucket: the plan it follows.
        params: those of `bucket.indices`.
        flat: memory of `bucket.numel` elements; None: new memory where the parameters are.

    Attributes:
        bucket: as given.
        flat: [bucket.numel], what travels.
        views: one tensor per parameter, of its shape, inside `flat`.
        layouts: of these.
    """

    def __init__(self, bucket: Bucket, params: Sequence[Tensor], flat: Tensor | None = None) -> None:
        if flat is None:
            flat = torch.empty(bucket.numel, dtype=params[0].dtype, device=params[0].device)
        self.bucket = bucket
        self.layouts = [layout_of(param) for param in params]
        self._shapes = [layout.shape for layout in self.layouts]
        self._matrices = [place for place, shape in enumerate(self._shapes) if len(shape) > 1]
        self._strides = [params[place].stride() for place in self._matrices]
        self._lie_in(flat.zero_())
        self._in_place = False  # whether a gradient lay there already

    def _lie_in(self, flat: Tensor) -> None:
        self.flat = flat
        places = zip(self.bucket.offsets, self.layouts, strict=True)
        self.views = [window(flat, offset, layout) for offset, layout in places]
        self._addresses = [view.data_ptr() for view in self.views]

    def leave_memory(self) -> None:
        """Go to memory of its own, with what is there: what it had is about to be used by others."""
        self._lie_in(self.flat.clone())
        self._in_place = False

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Return whether `params` still have the dtype, the place and the layouts that this was made for.

        Fused optimizers walk a parameter and its gradient in the order of memory, whatever their strides.
        """
        dtype, device = self.flat.dtype, self.flat.device
        # Lists: there may be hundreds, and every step asks.
        alike = (
            [p.dtype for p in params].count(dtype) == [p.device for p in params].count(device) == len(params)
        )
        strides = [params[place].stride() for place in self._matrices]
        return alike and self._shapes == [p.shape for p in params] and self._strides == strides

    def load(self, grads: Sequence[Tensor | None], used: set[int]) -> bytes:
        """Bring this rank's gradients into `flat`, each unless it lies there already; return their flags.

        A gradient that is missing, or sparse and travels apart, counts as zeros.

        Args:
            grads: the gradients.
            used: addresses of the gradients of other buckets that travel from where they lie.
        """
        self._renew_displaced()
        flags = flags_of(grads)
        # There may be hundreds, each of them new: what one gradient takes is felt.
        self._in_place = any(map(operator.is_, grads, self.views))
        if self._in_place or flags.strip(ALL_DENSE):
            self._bring_some(grads, flags)
        else:
            torch._foreach_copy_(self.views, self._apart(grads))
        return flags

    def _bring_some(self, grads: Sequence[Tensor | None], flags: bytes) -> None:
        views = list(zip(self.views, grads, flags, strict=True))
        moving = [(view, grad) for view, grad, flag in views if flag == DENSE and grad is not view]
        missing = [view for view, _, flag in views if flag != DENSE]
        if moving:
            places, sources = zip(*moving, strict=True)
            torch._foreach_copy_(places, self._apart(sources))
        if missing:
            torch._foreach_zero_(missing)

    def _renew_displaced(self) -> None:
        """Make a new view where the old one lies elsewhere by now.

        `p.grad.data = other` does that, and so does `model.half()` or `model.to(memory_format=...)`.
        """
        if [view.data_ptr() for view in self.views] == self._addresses:
            return
        for place, (view, address) in enumerate(zip(self.views, self._addresses, strict=True)):
            if view.data_ptr() != address:
                self.views[place] = window(self.flat, self.bucket.offsets[place], self.layouts[place])

    def _apart(self, grads: Sequence[Any]) -> list[Tensor]:
        """Return `grads`, copied where the program has put one together from `flat`, as `p.grad.T` is.

        It must be read as a whole before anything is written there.
        """
        first = self.flat.data_ptr()
        last = first + self.flat.nbytes
        inside = [first <= address < last for address in [grad.data_ptr() for grad in grads]]
        if not any(inside):
            return list(grads)
        return [grad.clone() if here else grad for grad, here in zip(grads, inside, strict=True)]

    def unload(self, params: Sequence[Tensor], exists: Sequence[bool]) -> None:
        """Make the reduced gradients those of `params`, and None those that no rank has."""
        if not self._in_place and all(exists):
            for param, view in zip(params, self.views, strict=True):
                param.grad = view
            return
        for param, view, here in zip(params, self.views, exists, strict=True):
            if not here:
                param.grad = None
            elif param.grad is not view:
                param.grad = view
