"""`ChunkPartition`: how the ranks of a host share the work on one chunk of a reduction.

A chunk takes the cores a fraction of a millisecond, of which finding out addresses and cutting tensors took a
quarter. So this is found out once for every length, and only the caller's own memory is cut anew.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.memory_ranges import Span
from mpisgd.transport.messages.link import even_ranges
from mpisgd.transport.shm.staging import copy_bytes, prefetch, typed_pieces
from mpisgd.transport.torch_reduction import combine_in_rank_order

__all__ = ["ChunkPartition", "partition_chunk"]


class ChunkPartition(NamedTuple):
    """One chunk as one rank works on it, in one of its staging buffers.

    Attributes:
        rank: of this rank.
        start: where the part begins that this rank combines, in elements of the chunk.
        stop: where it ends.
        staged: that part of everyone's staging buffer, one tensor [stop - start] per rank.
        own: the same part of this rank's: the offset in the chunk, and the address in the staging buffer.
        inputs: what the others combine, likewise: from the chunk to this rank's staging buffer.
        outputs: their results, from their staging buffers to the chunk.
    """

    rank: int
    start: int
    stop: int
    staged: Sequence[Tensor]
    own: Span
    inputs: Sequence[Span]
    outputs: Sequence[Span]

    def copy_in(self, address: int) -> None:
        """Copy what the others combine out of the chunk at `address`."""
        for _, offset, staged, nbytes in self.inputs:
            copy_bytes(staged, address + offset, nbytes)

    def combine(self, flat: Tensor, first: int, address: int, op: ReduceOp) -> None:
        """Combine this rank's part, and put the result into the chunk as well as into the staging buffer.

        The chunk begins with the element `first` of `flat`, at `address`.

        First where it has just been read from, if it can be: the others have a copy of the staging buffer in
        their caches, and a plain copy is the quickest way to write there.
        """
        mine = flat[first + self.start : first + self.stop]
        pieces = self._pieces(mine)
        _, offset, staged, nbytes = self.own
        at = address + offset
        if self.rank < 2:  # the first two are read before anything is written
            combine_in_rank_order(pieces, op, out=mine)
            copy_bytes(staged, at, nbytes)
        else:
            combine_in_rank_order(pieces, op, out=self.staged[self.rank])
            copy_bytes(at, staged, nbytes)

    def combine_into_first(self, flat: Tensor, first: int, op: ReduceOp) -> None:
        """Combine this rank's part, for a chunk as above, in the first rank's staging buffer."""
        mine = flat[first + self.start : first + self.stop]
        combine_in_rank_order(self._pieces(mine), op, out=self.staged[0])

    def _pieces(self, mine: Tensor) -> list[Tensor]:
        prefetch(mine)
        return [*self.staged[: self.rank], mine, *self.staged[self.rank + 1 :]]

    def copy_out(self, address: int) -> None:
        """Copy the results of the others into the chunk at `address`."""
        for _, offset, staged, nbytes in self.outputs:
            copy_bytes(address + offset, staged, nbytes)


@torch.inference_mode(False)
def partition_chunk(buffers: Sequence[Tensor], rank: int, numel: int, dtype: torch.dtype) -> ChunkPartition:
    """Return the partition of a chunk of `numel` elements of `dtype`.

    Args:
        buffers: the staging buffer of every rank, bytes.
        rank: this one.
        numel: of the chunk.
        dtype: of the chunk.
    """
    itemsize, size = dtype.itemsize, len(buffers)
    cuts = even_ranges(numel, size)
    start, stop = cuts[rank]
    staged = typed_pieces(buffers, stop - start, dtype, [start * itemsize] * size)

    def part(owner: int, first: int, last: int) -> Span:
        offset, nbytes = first * itemsize, (last - first) * itemsize
        return Span(owner, offset, buffers[owner].data_ptr() + offset, nbytes)

    inputs = [part(rank, stop, numel), part(rank, 0, start)]
    # Each begins with another one's: if all began with the same, they would be in each other's way.
    outputs = [part(other, *cuts[other]) for other in (*range(rank + 1, size), *range(rank))]
    return ChunkPartition(rank, start, stop, staged, part(rank, start, stop), inputs, outputs)
