"""`Region`: a tensor per rank in shared memory, which is reduced where it lies."""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.memory_ranges import MemoryRange, range_of
from mpisgd.transport.ipc.segment import Segment
from mpisgd.transport.messages.link import even_ranges
from mpisgd.transport.shm.staging import copy_bytes, prefetch
from mpisgd.transport.staging_layout import CHUNK_BYTES
from mpisgd.transport.torch_reduction import combine_in_rank_order

__all__ = ["Region", "combine_chunks"]


class RegionChunk(NamedTuple):
    """A piece of what this rank combines, small enough to stay in its cache.

    Attributes:
        pieces: everyone's, [n] each, in shared memory.
        out: [n], where the sum goes first: this rank's own piece where that is read first anyway.
        copies: where it goes from there.
    """

    pieces: Sequence[Tensor]
    out: Tensor
    copies: Sequence[MemoryRange]


def combine_chunks(chunks: Iterable[RegionChunk], op: ReduceOp) -> None:
    """Combine each of the chunks and copy the results to where they go."""
    for pieces, out, copies in chunks:
        prefetch(*pieces)
        combine_in_rank_order(pieces, op, out=out)
        for address, nbytes in copies:
            copy_bytes(address, out.data_ptr(), nbytes)


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
        first, last = even_ranges(self.mine.numel(), len(self.everyones))[self._rank]
        step = max(1, CHUNK_BYTES // self.mine.element_size())
        with torch.inference_mode(False):
            scratch = torch.empty(min(step, last - first), dtype=self.mine.dtype)
            bounds = [(at, min(last, at + step)) for at in range(first, last, step)]
            return [self._chunk(start, stop, scratch) for start, stop in bounds]

    def _chunk(self, start: int, stop: int, scratch: Tensor) -> RegionChunk:
        pieces = [other[start:stop] for other in self.everyones]
        in_place = self._rank < 2  # the first two are read before anything is written
        out = pieces[self._rank] if in_place else scratch[: stop - start]
        targets = [piece for rank, piece in enumerate(pieces) if not (in_place and rank == self._rank)]
        return RegionChunk(pieces, out, [range_of(piece) for piece in targets])
