"""How the gradient of a parameter lies in memory: as the parameter, so that optimizers walk both alike."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Layout", "layout_of", "window"]


class Layout(NamedTuple):
    """Shape and strides of a tensor whose elements fill `numel` places without gaps, in some order."""

    shape: torch.Size
    stride: tuple[int, ...]


def layout_of(param: Tensor) -> Layout:
    """Return the layout of `param`, a contiguous one where it has gaps."""
    stride = param.stride() if _is_dense(param) else torch.empty(param.shape, device="meta").stride()
    return Layout(param.shape, stride)


def window(flat: Tensor, offset: int, layout: Layout) -> Tensor:
    """Return a tensor of this layout on the storage of `flat`, `offset` elements after its beginning.

    It is a tensor of its own and not a slice: it has its own version counter, so that writing to one
    gradient is no write to the others as far as autograd can see.
    """
    own = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return own.set_(flat.untyped_storage(), flat.storage_offset() + offset, *layout)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill `tensor.numel()` places without gaps, in whatever order."""
    expected = 1
    for length, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
