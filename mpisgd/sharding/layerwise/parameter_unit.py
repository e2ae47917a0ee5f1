"""`Unit`: parameters that come into memory and leave it together, and which part of them a rank keeps.

memory    | weight ............ | bias | padding |
rank 0    [chunk][chunk][chunk]
rank 1                         [chunk][chunk][ch.]
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.gradients.bucketing import ALIGN_BYTES
from mpisgd.gradients.fusion_buffer import layout_of, window
from mpisgd.sharding.division import Member

__all__ = ["Chunk", "Unit"]


class Chunk(NamedTuple):
    """Some elements of the part that a rank keeps.

    Attributes:
        key: of what is in the files for it.
        start: its first element in the rank's part.
        numel: how many there are.
    """

    key: Tensor
    start: int
    numel: int


class Unit:
    """Parameters of one dtype that are in memory while somebody uses them.

    Memory is given back by making the storage empty, on which the parameters, and what autograd has kept of
    them for backward, are views: these are valid again once it is filled again, as in FSDP.

    Args:
        name: for messages and files.
        params: the parameters, with values.
        size: of the group, of which each rank keeps an equal part.
        rank: this one's.
        chunk_bytes: most bytes of a chunk.

    Attributes:
        users: who needs it in memory now.
        arrived: the parameters whose gradients are complete in this backward.
        chunks: of this rank's part.
    """

    def __init__(self, name: str, params: Sequence[Tensor], size: int, rank: int, chunk_bytes: int) -> None:
        self.name, self.params = name, list(params)
        self.layouts = [layout_of(param) for param in params]
        self._starts, self.part = _place(params, size)
        self._first = rank * self.part
        self.flat = torch.zeros(size * self.part, dtype=params[0].dtype)
        self._take(params)
        self.chunks = list(_chunks(self.part, chunk_bytes // params[0].element_size()))
        self.users: set[Hashable] = {"made"}
        self.arrived: set[int] = set()

    def _take(self, params: Sequence[Tensor]) -> None:
        """Move the parameters into the memory of this unit."""
        for param, view in zip(params, self.views(self.flat), strict=True):
            view.copy_(param.detach())
            param.data = view

    @property
    def is_trainable(self) -> bool:
        """Whether all parameters get gradients: backward is done with the unit once they are there."""
        return all(param.requires_grad for param in self.params)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return a tensor for each parameter inside of memory such as `flat`, [size * part]."""
        places = zip(self._starts, self.layouts, strict=True)
        return [window(flat, start, layout) for start, layout in places]

    def own(self, flat: Tensor) -> Tensor:
        """Return this rank's part of memory such as `flat`."""
        return flat[self._first : self._first + self.part]

    def make_room(self) -> None:
        """Give the parameters memory, whose content is arbitrary."""
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())

    def moved(self) -> Iterator[Tensor]:
        """Yield the parameters that the program has given other memory; the unit has its own."""
        begin, itemsize = self.flat.data_ptr(), self.flat.element_size()
        for param, start in zip(self.params, self._starts, strict=True):
            if param.numel() and (
                param.data_ptr() != begin + start * itemsize or param.dtype != self.flat.dtype
            ):
                yield param

    def drop(self) -> None:
        """Give the memory of the parameters back."""
        self.flat.untyped_storage().resize_(0)

    def members(self, chunk: Chunk) -> Iterator[Member]:
        """Yield what is in a chunk; `param` is the place of a parameter in `params`."""
        begin = self._first + chunk.start
        for k, (start, layout) in enumerate(zip(self._starts, self.layouts, strict=True)):
            low, high = max(begin, start), min(begin + chunk.numel, start + layout.shape.numel())
            if low < high:
                yield Member(k, low - start, high - low, low - begin)


def _place(params: Sequence[Tensor], size: int) -> tuple[list[int], int]:
    """Return where each parameter begins, and the length of a rank's part."""
    line = ALIGN_BYTES // params[0].element_size()
    starts, end = [], 0
    for param in params:
        starts.append(end)
        end += -(-param.numel() // line) * line
    return starts, max(line, -(-end // (size * line)) * line)


def _chunks(part: int, most: int) -> Iterator[Chunk]:
    step = max(ALIGN_BYTES, most // ALIGN_BYTES * ALIGN_BYTES)
    for start in range(0, part, step):
        yield Chunk(torch.empty(0), start, min(step, part - start))
