"""What a rank needs of tensors that are loaded, the parts that it owns, and these parts."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.collectives.objects import Allocate
from mpisgd.gradients.fusion_buffer import StridedLayout, flat_view, window
from mpisgd.sharding.division import Member

__all__ = ["LEAST_BYTES", "LoadedPart", "NeededPart", "elements_of"]

LEAST_BYTES = 4096  # of a tensor that is divided; all ranks get smaller ones


class NeededPart(NamedTuple):
    """What a rank needs of a parameter, and so of each tensor of its shape.

    Attributes:
        layout: how the parameter lies in memory.
        runs: (first element, number of elements), in the order of memory; () if it needs nothing.
    """

    layout: StridedLayout
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def by_members(cls, layout: StridedLayout, members: Sequence[Member]) -> "NeededPart":
        """Return the needed parts of a rank that has these parts of a parameter; they are in order."""
        return cls(layout, tuple((member.first, member.numel) for member in members))

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, empty: Allocate) -> "LoadedPart | Tensor":
        """Return memory for what is needed of a tensor; of those of another shape that is everything."""
        if self.runs and not self._is_cut(shape):
            return empty(tuple(shape), dtype)
        numel = sum(numel for _, numel in self.runs)
        return LoadedPart(self, torch.Size(shape), empty((numel,), dtype))

    def of(self, tensor: Tensor) -> list[Tensor]:
        """Return the needed elements of a tensor, run by run; see `in_buffer`."""
        if not self.runs:
            return []
        if not self._is_cut(tensor.shape):
            return [tensor.reshape(-1)]
        flat = flat_view(tensor, self.layout)
        return [flat[first : first + numel] for first, numel in self.runs]

    def in_buffer(self, buffer: "LoadedPart | Tensor") -> list[Tensor]:
        """Return the memory of what is needed in what `buffer` has made."""
        if isinstance(buffer, Tensor):
            return [buffer.reshape(-1)]
        lengths = [numel for _, numel in self.runs]
        return list(torch.split(buffer.elements, lengths)) if lengths else []

    def _is_cut(self, shape: Sequence[int]) -> bool:
        return tuple(shape) == tuple(self.layout.shape)


class LoadedPart(NamedTuple):
    """What a rank has got of a tensor that was loaded.

    Attributes:
        needed: which part that is.
        shape: of the tensor.
        elements: the part, run by run.
    """

    needed: NeededPart
    shape: torch.Size
    elements: Tensor

    def cut(self, first: int, numel: int) -> Tensor:
        """Return elements that lie in one run, in the order of memory."""
        runs = self.needed.runs
        place = bisect.bisect_right([start for start, _ in runs], first) - 1
        begin = sum(length for _, length in runs[:place]) + first - runs[place][0]
        return self.elements[begin : begin + numel]

    def whole(self) -> Tensor:
        """Return the tensor, of which there is everything."""
        return window(self.elements, 0, self.needed.layout)


def elements_of(value: LoadedPart | Tensor, layout: StridedLayout, first: int, numel: int) -> Tensor:
    """Return elements of a tensor of a parameter's shape, in the order of the parameter's memory."""
    if isinstance(value, LoadedPart):
        return value.cut(first, numel)
    return flat_view(value, layout)[first : first + numel]
