"""`Region`: a tensor per rank in shared memory, which is reduced where it lies."""

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.transport.messages.link import split_evenly
from mpisgd.transport.shm.segment import Segment
from mpisgd.transport.shm.streams import CHUNK_BYTES, Place, place_of

__all__ = ["Region"]


class RegionChunk(NamedTuple):
    """A piece of what this rank combines, small enough to stay in its cache.

    Attributes:
        pieces: everyone's, [n] each, in shared memory.
        out: [n], where the sum goes first: this rank's own piece where that is read first anyway.
        copies: where it goes from there.
    """

    pieces: Sequence[Tensor]
    out: Tensor
    copies: Sequence[Place]


class Region:
    """The same number of elements for every rank of a host, each rank's visible to all.

    Between operations `mine` is an ordinary tensor of this rank. The tensors keep the memory alive.

    Attributes:
        mine: [numel], this rank's.
        everyones: [numel] of each rank, `mine` among them.
    """

    def __init__(self, segment: Segment, rank: int, size: int, numel: int, dtype: torch.dtype) -> None:
        self.everyones: list[Tensor] = [segment.share_as(other, numel, dtype) for other in range(size)]
        self.mine = self.everyones[rank]
        self._rank = rank

    @functools.cached_property
    def part_for_all(self) -> list[RegionChunk]:
        """What this rank combines where every rank combines its part for everyone; cut once and for all."""
        first, last = split_evenly(self.mine.numel(), len(self.everyones))[self._rank]
        return self._cut(first, last, range(len(self.everyones)))

    @functools.cached_property
    def all_for_me(self) -> list[RegionChunk]:
        """Everything, which this rank combines for itself alone."""
        return self._cut(0, self.mine.numel(), [self._rank])

    def _cut(self, first: int, last: int, receivers: Collection[int]) -> list[RegionChunk]:
        step = max(1, CHUNK_BYTES // self.mine.element_size())
        with torch.inference_mode(False):
            scratch = torch.empty(min(step, last - first), dtype=self.mine.dtype)
            bounds = [(at, min(last, at + step)) for at in range(first, last, step)]
            return [self._chunk(start, stop, scratch, receivers) for start, stop in bounds]

    def _chunk(self, start: int, stop: int, scratch: Tensor, receivers: Collection[int]) -> RegionChunk:
        pieces = [other[start:stop] for other in self.everyones]
        in_place = self._rank < 2  # the first two are read before anything is written
        out = pieces[self._rank] if in_place else scratch[: stop - start]
        targets = [pieces[rank] for rank in receivers if not (in_place and rank == self._rank)]
        return RegionChunk(pieces, out, [place_of(piece) for piece in targets])
