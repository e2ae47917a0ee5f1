"""`StagingMemory`: two buffers of each rank of a host, which are used in turn and which all of them see."""

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from mpisgd.transport.shm.chunk_partition import ChunkPartition, partition_chunk
from mpisgd.transport.shm.small_sum import small_sums
from mpisgd.transport.shm.staging import typed_pieces

__all__ = ["MAX_CACHED", "StagingMemory"]

MAX_CACHED = 256  # shapes of which the tensors are kept


class StagingMemory:
    """The buffers, and which of them is whose turn.

    Args:
        buffers: for each turn the buffer of every rank, bytes.
        rank: this one among those of the host.

    Attributes:
        rank: as given.
        size: how many ranks there are.
        turn: which buffers are the current ones.
        addresses: for each turn where every rank's buffer begins.
        small_sums: of the number of elements, the dtype and `averages`; see there.
    """

    def __init__(self, buffers: Sequence[Sequence[Tensor]], rank: int) -> None:
        self.rank = rank
        self.size = len(buffers[0])
        self.turn = 0
        self._buffers = buffers
        self.addresses = [[buffer.data_ptr() for buffer in everyones] for everyones in buffers]
        self._starts = (0,) * self.size
        # Making these anew takes longer than adding up a small message.
        self._pieces = lru_cache(MAX_CACHED)(lambda turn, *what: typed_pieces(buffers[turn], *what))
        self.small_sums = lru_cache(MAX_CACHED)(partial(small_sums, self.addresses))
        self._partition = lru_cache(MAX_CACHED)(
            lambda turn, *what: partition_chunk(buffers[turn], rank, *what)
        )

    def next_addresses(self) -> list[int]:
        """Return where everyone's staging buffer for the next chunk begins.

        This rank may write into its own even before the consistency check: one or a barrier has come since
        anybody read there, the one after the chunk before.
        """
        return self.addresses[self.turn ^ 1]

    def swap_buffers(self) -> None:
        """Make the next buffers the current ones; once all ranks are known to do the same operation."""
        self.turn ^= 1

    def guarded(self, *, alone: bool = False) -> Sequence[Tensor]:
        """Return everyone's current buffers, from which others may still read; see `HostTransport`."""
        coming = self._buffers[self.turn ^ 1]
        of_others = [*coming[: self.rank], *coming[self.rank + 1 :]] if alone else []
        return [*self._buffers[self.turn], *of_others]

    def pieces(self, numel: int, dtype: torch.dtype, starts: tuple[int, ...] | None = None) -> list[Tensor]:
        """Return [numel] of everyone's current buffer, from the byte `starts[rank]`, or 0, on."""
        return self._pieces(self.turn, numel, dtype, starts or self._starts)

    def next_pieces(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return [numel] of everyone's next buffer, for whoever knows that all have arrived already."""
        return self._pieces(self.turn ^ 1, numel, dtype, self._starts)

    def partition_next(self, numel: int, dtype: torch.dtype) -> ChunkPartition:
        """Return how the ranks share the work on the next chunk, of `numel` elements, in its buffer."""
        return self._partition(self.turn ^ 1, numel, dtype)
