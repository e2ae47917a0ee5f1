"""`ShmTransport`: the staging memory of the ranks of a host, which all of them see, and their barrier.

What goes through it are generators (`mpisgd.transport.shm.reduction`, `.data_movement`) that yield wherever
all ranks must have arrived. Every operation begins with a consistency check: all ranks have left the one
before.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.errors import CollectiveTimeout
from mpisgd.transport.ipc.control_block import CONTROL_BYTES, ControlBlock
from mpisgd.transport.ipc.segment import Segment, open_segment
from mpisgd.transport.shm.chunk_partition import ChunkPartition, partition_chunk
from mpisgd.transport.shm.region import Region, combine_chunks
from mpisgd.transport.shm.staging import BUFFER_BYTES, typed_pieces

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["STAGING_BYTES", "ShmTransport"]

STAGING_BYTES = CONTROL_BYTES + 2 * BUFFER_BYTES
MAX_CACHED = 256  # shapes of which the tensors are kept


class ShmTransport:
    """The staging memory of those ranks of a group that share this host.

    Methods are called inside the queue, after the consistency check, by all ranks alike. They take contiguous
    CPU tensors; roots are ranks of the host.

    Args:
        communicator: a communicator of these ranks.
        segment: shared by them, STAGING_BYTES for each.
        name: of the group, for messages.
        timeout_s: how long to wait for the others in the middle of an operation.

    Attributes:
        rank: this rank among those of the host.
        size: how many there are.
        control: the words through which they wait for each other.
    """

    name = "node"

    def __init__(
        self, communicator: "Communicator", segment: Segment, *, name: str, timeout_s: float
    ) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self._communicator = communicator
        self.control = ControlBlock(
            segment, communicator.rank, communicator.global_ranks, communicator.progress
        )
        self._name = name
        self._timeout_s = timeout_s
        self._turn = 0
        shares = [segment.share(rank)[CONTROL_BYTES:] for rank in range(self.size)]
        buffers = [[share[i * BUFFER_BYTES : (i + 1) * BUFFER_BYTES] for share in shares] for i in (0, 1)]
        self._addresses = [[buffer.data_ptr() for buffer in everyones] for everyones in buffers]
        self._starts = (0,) * self.size
        # Making these anew takes longer than adding up a small message.
        self._pieces = lru_cache(MAX_CACHED)(lambda turn, *what: typed_pieces(buffers[turn], *what))
        self._partition = lru_cache(MAX_CACHED)(
            lambda turn, *what: partition_chunk(buffers[turn], communicator.rank, *what)
        )

    def next_addresses(self) -> list[int]:
        """Return where everyone's staging buffer for the next chunk begins.

        This rank may write into its own even before the consistency check: one or a barrier has come since
        anybody read there, the one after the chunk before.
        """
        return self._addresses[self._turn ^ 1]

    def swap_buffers(self) -> None:
        """Make the next buffers the current ones; once all ranks are known to do the same operation."""
        self._turn ^= 1

    def pieces(self, numel: int, dtype: torch.dtype, starts: tuple[int, ...] | None = None) -> list[Tensor]:
        """Return [numel] of everyone's current buffer, from the byte `starts[rank]`, or 0, on."""
        return self._pieces(self._turn, numel, dtype, starts or self._starts)

    def next_pieces(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return [numel] of everyone's next buffer, for whoever knows that all have arrived already."""
        return self._pieces(self._turn ^ 1, numel, dtype, self._starts)

    def partition_next(self, numel: int, dtype: torch.dtype) -> ChunkPartition:
        """Return how the ranks share the work on the next chunk, of `numel` elements, in its buffer."""
        return self._partition(self._turn ^ 1, numel, dtype)

    def run_steps(self, steps: Iterator[None]) -> None:
        """Run an operation to its end, with a barrier wherever it yields."""
        for _ in steps:
            self.barrier()

    def barrier(self) -> None:
        """Wait for the ranks of this host, in the middle of an operation."""
        if not self.control.barrier(self._timeout_s):
            rank = self._communicator.global_ranks[self.rank]
            raise CollectiveTimeout(
                f"group '{self._name}': rank {rank} has waited {self._timeout_s:.1f} s in the middle of an "
                f"operation for {self.control.missing()}"
            )

    def open_segment(self, nbytes: int) -> Segment | None:
        """Return new memory, `nbytes` for each rank, None on all of them if there is none. Collective."""
        return open_segment(self._communicator, nbytes)

    def region(self, segment: Segment, numel: int, dtype: torch.dtype) -> Region:
        """Return the tensors that lie in `segment`. Not collective."""
        return Region(segment, self.rank, self.size, numel, dtype)

    def all_reduce_region(self, region: Region, op: ReduceOp) -> None:
        """Combine what lies in a region over the ranks, in place and without staging.

        The owner of a part reads it from everyone and writes the result to everyone, in pieces that stay in
        its cache.

        Cost: reads and writes the message once per rank; one barrier.
        """
        combine_chunks(region.part_for_all, op)
        self.barrier()
