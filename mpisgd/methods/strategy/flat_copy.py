"""`FlatCopy`: a copy of all parameters in one piece of host memory, which travels as one message."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.transport.torch_reduction import combine_in_rank_order

__all__ = ["FlatCopy"]

ALIGN_BYTES = 64


class _Form(NamedTuple):
    """What a tensor of a copy is like."""

    dtype: torch.dtype
    shape: torch.Size


class FlatCopy:
    """Memory for all parameters, those of a dtype one after the other; zeros at first.

    Args:
        like: the parameters, or anything of their dtypes and shapes.

    Attributes:
        memory: all of it, in bytes.
        tensors: the place of each parameter in it, in its shape.
    """

    def __init__(self, like: Sequence[Tensor | _Form]) -> None:
        self._forms = [_Form(each.dtype, torch.Size(each.shape)) for each in like]
        lengths: dict[torch.dtype, int] = {}
        for form in self._forms:
            lengths[form.dtype] = lengths.get(form.dtype, 0) + form.shape.numel()
        sizes = [-(-n * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES for dtype, n in lengths.items()]
        self.memory = torch.zeros(sum(sizes), dtype=torch.uint8)
        parts = zip(self.memory.split_with_sizes(sizes), lengths.items(), strict=True)
        self._segments = {dtype: part[: n * dtype.itemsize].view(dtype) for part, (dtype, n) in parts}
        self.tensors = self._views()

    def _views(self) -> list[Tensor]:
        """Return the place of each parameter, in its shape."""
        views, starts = [], dict.fromkeys(self._segments, 0)
        for dtype, shape in self._forms:
            start = starts[dtype]
            starts[dtype] = start + shape.numel()
            views.append(self._segments[dtype][start : starts[dtype]].view(shape))
        return views

    def new_like(self) -> "FlatCopy":
        """Return memory for another copy of the same parameters."""
        return FlatCopy(self._forms)

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Return whether `params` have the dtypes and shapes that this was made for."""
        return self._forms == [(param.dtype, param.shape) for param in params]

    @torch.no_grad()
    def load(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters."""
        for mine, param in zip(self.tensors, params, strict=True):
            mine.copy_(param)

    @torch.no_grad()
    def unload(self, params: Sequence[Tensor]) -> None:
        """Copy it back into the parameters."""
        for mine, param in zip(self.tensors, params, strict=True):
            param.copy_(mine)

    def copy_(self, other: "FlatCopy") -> None:
        """Take over what `other` has."""
        self.memory.copy_(other.memory)

    def add_difference_(self, minuend: "FlatCopy", subtrahend: "FlatCopy", share: float) -> None:
        """Add `share` of minuend - subtrahend; `minuend` has the difference then."""
        for dtype, mine in self._segments.items():
            mine.add_(minuend._segments[dtype].sub_(subtrahend._segments[dtype]), alpha=share)

    def scale_(self, factor: float) -> None:
        """Multiply by a number."""
        for mine in self._segments.values():
            mine.mul_(factor)

    def become_mean(self, others: "Sequence[FlatCopy]") -> None:
        """Take the mean with `others`, as an all-reduce of ranks in this order does, to the last bit."""
        for dtype, mine in self._segments.items():
            pieces = [mine, *(other._segments[dtype] for other in others)]
            combine_in_rank_order(pieces, ReduceOp.AVG, out=mine)
