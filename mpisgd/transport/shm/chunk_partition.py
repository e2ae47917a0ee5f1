"""`ChunkPartition`: how the ranks of a host share the work on one chunk of a reduction.

A chunk takes the cores a fraction of a millisecond, of which finding out addresses and cutting tensors took a
quarter. So this is found out once for every length, and only the caller's own memory is cut anew.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.core.dtypes import ReduceOp, combine_in_rank_order
from mpisgd.transport.messages.link import split_evenly
from mpisgd.transport.shm.streams import bring_near, copy_bytes

__all__ = ["ChunkPartition", "Move", "parts_of"]


class Move(NamedTuple):
    """A copy between staging memory and a chunk.

    Attributes:
        staged: the address in staging memory.
        offset: the place in the chunk, in bytes.
        nbytes: how many.
    """

    staged: int
    offset: int
    nbytes: int


class ChunkPartition(NamedTuple):
    """The view of one rank of one chunk, in one half of the staging memory.

    Attributes:
        rank: whose view.
        start: where the part begins that this rank combines, in elements of the chunk.
        stop: where it ends.
        staged: that part of everyone's staging memory, one tensor [stop - start] per rank.
        own: the same part of this rank's.
        gives: what the others combine, from the chunk to this rank's staging memory.
        takes: their results, from their staging memory to the chunk.
    """

    rank: int
    start: int
    stop: int
    staged: Sequence[Tensor]
    own: Move
    gives: Sequence[Move]
    takes: Sequence[Move]

    def give(self, address: int) -> None:
        """Copy what the others combine out of the chunk at `address`."""
        for staged, offset, nbytes in self.gives:
            copy_bytes(staged, address + offset, nbytes)

    def combine(self, flat: Tensor, first: int, address: int, op: ReduceOp) -> None:
        """Combine this rank's part, and put the result into the chunk as well as into the staging memory.

        The chunk begins with the element `first` of `flat`, at `address`.

        First where it has just been read from, if it can be: the others have a copy of the staging memory in
        their caches, and a plain copy is the quickest way to write there.
        """
        mine = flat[first + self.start : first + self.stop]
        pieces = self._pieces(mine)
        staged, offset, nbytes = self.own
        at = address + offset
        if self.rank < 2:  # the first two are read before anything is written
            combine_in_rank_order(pieces, op, out=mine)
            copy_bytes(staged, at, nbytes)
        else:
            combine_in_rank_order(pieces, op, out=self.staged[self.rank])
            copy_bytes(at, staged, nbytes)

    def combine_into_first(self, flat: Tensor, first: int, op: ReduceOp) -> None:
        """Combine this rank's part, for a chunk as above, in the first rank's staging memory."""
        mine = flat[first + self.start : first + self.stop]
        combine_in_rank_order(self._pieces(mine), op, out=self.staged[0])

    def _pieces(self, mine: Tensor) -> list[Tensor]:
        bring_near(mine)
        return [*self.staged[: self.rank], mine, *self.staged[self.rank + 1 :]]

    def take(self, address: int) -> None:
        """Copy the results of the others into the chunk at `address`."""
        for staged, offset, nbytes in self.takes:
            copy_bytes(address + offset, staged, nbytes)


def parts_of(halves: Sequence[Tensor], rank: int, numel: int, dtype: torch.dtype) -> ChunkPartition:
    """Return the parts of a chunk of `numel` elements.

    Args:
        halves: the staging memory of every rank, bytes.
        rank: this one.
        numel: of the chunk.
        dtype: of the chunk.
    """
    itemsize = dtype.itemsize
    cuts = split_evenly(numel, len(halves))
    start, stop = cuts[rank]
    staged = [half[start * itemsize : stop * itemsize].view(dtype) for half in halves]

    def move(source: int, first: int, last: int) -> Move:
        return Move(halves[source].data_ptr() + first * itemsize, first * itemsize, (last - first) * itemsize)

    gives = [move(rank, *span) for span in ((stop, numel), (0, start))]
    # Each begins with another one's: if all began with the same, they would be in each other's way.
    takes = [move(other, *cuts[other]) for other in (*range(rank + 1, len(halves)), *range(rank))]
    return ChunkPartition(rank, start, stop, staged, move(rank, start, stop), gives, takes)
