"""`ShmTransport`: the staging memory of ranks that share a host, which all of them see, and how they meet.

What goes through it are generators (`mpisgd.transport.shm.reduction`, `.data_movement`) that yield wherever
all ranks must have come. Every operation begins with a consistency check: all ranks have left the one before.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpisgd.core.dtypes import ReduceOp, combine_in_rank_order
from mpisgd.errors import CollectiveTimeout
from mpisgd.transport.cma.all_reduce import CmaTransport
from mpisgd.transport.cma.cross_memory_attach import CrossMemoryAttach
from mpisgd.transport.cma.peer_access import PeerAccess
from mpisgd.transport.shm.chunk_partition import ChunkPartition, parts_of
from mpisgd.transport.shm.control_block import CONTROL_BYTES, ControlBlock
from mpisgd.transport.shm.region import Region, RegionChunk
from mpisgd.transport.shm.segment import HALF_BYTES, Segment, open_segment
from mpisgd.transport.shm.streams import bring_near, copy_bytes

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["STAGING_BYTES", "ShmTransport"]

STAGING_BYTES = CONTROL_BYTES + 2 * HALF_BYTES
MAX_REMEMBERED = 256  # shapes of which the tensors are kept


class ShmTransport:
    """The staging memory of those ranks of a group that share this host.

    Methods are called inside the queue, after the handshake, by all ranks alike. They take contiguous CPU
    tensors; roots are ranks of the host.

    Args:
        wire: a communicator of these ranks.
        segment: shared by them, STAGING_BYTES for each.
        memory: of their processes, where they can reach it.
        name: of the group, for messages.
        timeout_s: how long to wait for the others in the middle of an operation.

    Attributes:
        rank: this rank among those of the host.
        size: how many there are.
        control: the words through which they wait for each other.
        direct: how they reduce in each other's memory, None where they cannot reach it.
    """

    def __init__(
        self,
        wire: "Communicator",
        segment: Segment,
        memory: CrossMemoryAttach | None = None,
        *,
        name: str,
        timeout_s: float,
    ) -> None:
        self.rank = wire.rank
        self.size = wire.size
        self._wire = wire
        self.control = ControlBlock(segment, wire.rank, wire.size, wire.progress)
        self.direct = (
            None if memory is None else CmaTransport(memory, PeerAccess(self.control), self.rank, self.size)
        )
        self._name = name
        self._timeout_s = timeout_s
        self._turn = 0
        shares = [segment.share(rank)[CONTROL_BYTES:] for rank in range(self.size)]
        self._halves = [[share[i * HALF_BYTES : (i + 1) * HALF_BYTES] for share in shares] for i in (0, 1)]
        self._addresses = [[half.data_ptr() for half in halves] for halves in self._halves]
        self._known: dict[tuple[int, Sequence[int], int, torch.dtype], list[Tensor]] = {}
        self._parts: dict[tuple[int, int, torch.dtype], ChunkPartition] = {}

    def next_half(self, dtype: torch.dtype) -> list[Tensor]:
        """Return everyone's staging memory for the next chunk, as elements of `dtype`."""
        self.advance()
        return [half.view(dtype) for half in self._halves[self._turn]]

    def coming_half(self) -> list[int]:
        """Return where everyone's half for the next chunk begins, without going on to it.

        This rank may write into its own even before the handshake: a handshake or a barrier has come since
        anybody read there, the one after the chunk before.
        """
        return self._addresses[self._turn ^ 1]

    def advance(self) -> None:
        """Go on to the half for the next chunk; once all ranks are known to do the same operation."""
        self._turn ^= 1

    def present_half(self, starts: tuple[int, ...], numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return [numel] of everyone's present half, from the byte `starts[rank]` on."""
        return self._pieces(self._turn, starts, numel, dtype)

    def coming_pieces(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return [numel] of everyone's coming half, for whoever knows that all are there already."""
        return self._pieces(self._turn ^ 1, (0,) * self.size, numel, dtype)

    def _pieces(self, turn: int, starts: tuple[int, ...], numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Many are remembered: making them anew takes longer than adding up a small message."""
        key = (turn, starts, numel, dtype)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            nbytes = numel * dtype.itemsize
            halves = zip(self._halves[turn], starts, strict=True)
            with torch.inference_mode(False):  # the first to ask may be in that mode, later ones are not
                found = [half[start : start + nbytes].view(dtype) for half, start in halves]
            self._known[key] = found
        return found

    def coming_parts(self, numel: int, dtype: torch.dtype) -> ChunkPartition:
        """Return how the ranks share the work on the next chunk, of `numel` elements, in its half."""
        key = (self._turn ^ 1, numel, dtype)
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) >= MAX_REMEMBERED:
                self._parts.clear()
            with torch.inference_mode(False):
                found = self._parts[key] = parts_of(self._halves[key[0]], self.rank, numel, dtype)
        return found

    def go_on(self, steps: Iterator[None]) -> None:
        """Run an operation to its end, with a meeting wherever it yields."""
        for _ in steps:
            self.barrier()

    def leave(self) -> None:
        """Take back what others may reach of this rank's memory: it leaves an operation before its end."""
        if self.direct is not None:
            self.direct.exposure.leave()

    def barrier(self) -> None:
        """Wait for the ranks of this host, in the middle of an operation."""
        if not self.control.barrier(self._timeout_s):
            names = self._wire.global_ranks
            missing = ", ".join(str(names[local]) for local in self.control.missing())
            raise CollectiveTimeout(
                f"group '{self._name}': rank {names[self.rank]} has waited {self._timeout_s:.1f} s in the "
                f"middle of an operation for rank {missing}"
            )

    def open_segment(self, nbytes: int) -> Segment | None:
        """Return new memory, `nbytes` for each rank, None on all of them if there is none. Collective."""
        return open_segment(self._wire, nbytes)

    def region(self, segment: Segment, numel: int, dtype: torch.dtype) -> Region:
        """Return the tensors that lie in `segment`. Not collective."""
        return Region(segment, self.rank, self.size, numel, dtype)

    def all_reduce_region(self, region: Region, op: ReduceOp) -> None:
        """Combine what lies in a region over the ranks, in place and without staging.

        The owner of a part reads it from everyone and writes the result to everyone, in pieces that stay in
        its cache.

        Cost: reads and writes the message once per rank; one barrier.
        """
        _combine(region.part_for_all, op)
        self.barrier()

    def reduce_region(self, region: Region, op: ReduceOp, root: int) -> None:
        """Combine what lies in a region into root's part of it.

        Nobody waits at the end: the next operation's handshake must come before anyone writes there again.

        Cost: root reads everyone's message and writes its own; the others do nothing.
        """
        if self.rank == root:
            _combine(region.all_for_me, op)


def _combine(chunks: Iterable[RegionChunk], op: ReduceOp) -> None:
    for pieces, out, copies in chunks:
        bring_near(*pieces)
        combine_in_rank_order(pieces, op, out=out)
        for address, nbytes in copies:
            copy_bytes(address, out.data_ptr(), nbytes)
