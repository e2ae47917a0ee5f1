"""`NodePlane`: the reductions of ranks that share a host, through staging memory that all of them see.

A message goes through in chunks that stay in cache. Of each chunk, a rank copies its piece into its staging
memory; when all have, it combines its own part of the chunk straight from everyone's memory; when all have,
it copies the finished parts out. Two halves of the staging memory are used in turn, so that a fast rank may
fill one while a slow one still reads the other:

    rank 0   in(0) | reduce(0) | out(0) in(1) | reduce(1) | out(1) in(2) | ...
    rank 1   in(0) | reduce(0) | out(0) in(1) | reduce(1) | out(1) in(2) | ...
    half       0         0         0      1         1         1      0
                   barriers stand where the bars are

Every operation begins after a handshake, at which all ranks have left the operation before.
"""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpisgd import config
from mpisgd.comm.algorithms.link import split_evenly
from mpisgd.comm.dtypes import ReduceOp, combine_in_rank_order
from mpisgd.comm.node.control import CONTROL_BYTES, ControlBlock
from mpisgd.comm.node.region import Region
from mpisgd.comm.node.segment import Segment, open_segment
from mpisgd.comm.topology import Topology
from mpisgd.errors import CollectiveTimeout

if TYPE_CHECKING:
    from mpisgd.comm.mpi import Wire

__all__ = ["NodePlane", "open_plane"]

HALF_BYTES = 2**20
REGION_CHUNK_BYTES = 2**19
STAGING_BYTES = CONTROL_BYTES + 2 * HALF_BYTES


def open_plane(wire: "Wire", topology: Topology, *, name: str, timeout_s: float) -> "NodePlane | None":
    """Return the plane of a group, None where its ranks cannot have one. Collective.

    One that should be possible and is not is worth a warning, from one rank.
    """
    if topology.num_nodes > 1 or wire.size == 1 or not all(wire.all_gather_object(config.shared_memory())):
        return None
    segment = open_segment(wire, STAGING_BYTES)
    if segment is None:
        if wire.rank == 0:
            warnings.warn(
                f"the ranks of group '{name}' share a host but no memory (separate containers?); everything "
                "goes through MPI instead, which is slower. MPISGD_SHARED_MEMORY=0 asks for that in silence",
                RuntimeWarning,
                stacklevel=2,
            )
        return None
    control = ControlBlock(segment, wire.rank, wire.size, wire.progress)
    return NodePlane(wire, segment, control, name=name, timeout_s=timeout_s)


class NodePlane:
    """The staging memory of a group whose ranks all share this host.

    Methods are called inside the lane, after the handshake, by all ranks alike. They take contiguous CPU
    tensors; roots are group ranks.

    Args:
        wire: the communicator of the lane.
        segment: shared by the ranks of the group, STAGING_BYTES for each.
        control: the words through which they wait for each other.
        name: of the group, for messages.
        timeout_s: how long to wait for the others in the middle of an operation.
    """

    def __init__(
        self, wire: "Wire", segment: Segment, control: ControlBlock, *, name: str, timeout_s: float
    ) -> None:
        self.rank = wire.rank
        self.size = wire.size
        self._wire = wire
        self.control = control
        self._name = name
        self._timeout_s = timeout_s
        self._turn = 0
        shares = [segment.share(rank)[CONTROL_BYTES:] for rank in range(self.size)]
        self._halves = [[share[i * HALF_BYTES : (i + 1) * HALF_BYTES] for share in shares] for i in (0, 1)]

    def _next_half(self, dtype: torch.dtype) -> list[Tensor]:
        """Return everyone's staging memory for the next chunk, as elements of `dtype`."""
        self._turn ^= 1
        return [half.view(dtype) for half in self._halves[self._turn]]

    def barrier(self) -> None:
        """Wait for the ranks of this host, in the middle of an operation."""
        if not self.control.barrier(self._timeout_s):
            missing = ", ".join(map(str, self.control.missing()))
            raise CollectiveTimeout(
                f"group '{self._name}': rank {self.rank} of {self.size} has waited {self._timeout_s:.1f} s "
                f"in the middle of an operation for rank {missing}"
            )

    def _chunks(self, numel: int, itemsize: int, parts: int = 1) -> list[slice]:
        """Cut `numel` elements into chunks of which `parts` fit into a half."""
        step = max(1, HALF_BYTES // (itemsize * parts))
        return [slice(start, min(numel, start + step)) for start in range(0, numel, step)]

    def all_reduce(self, flat: Tensor, op: ReduceOp) -> None:
        """Combine `flat` [n], of any reducible dtype, over the ranks, in place.

        Cost: three passes over the message in memory, wherever the ranks are; 2 barriers per chunk.
        """
        for chunk in self._chunks(flat.numel(), flat.element_size()):
            self._all_reduce_chunk(flat[chunk], op)

    def _all_reduce_chunk(self, mine: Tensor, op: ReduceOp) -> None:
        staging = [half[: mine.numel()] for half in self._next_half(mine.dtype)]
        parts = [slice(*part) for part in split_evenly(mine.numel(), self.size)]
        staging[self.rank].copy_(mine)
        self.barrier()
        own = parts[self.rank]
        combine_in_rank_order([half[own] for half in staging], op, out=mine[own])
        staging[self.rank][own].copy_(mine[own])
        self.barrier()
        for rank, part in enumerate(parts):
            if rank != self.rank:
                mine[part].copy_(staging[rank][part])

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
        first, last = split_evenly(region.mine.numel(), self.size)[self.rank]
        step = max(1, REGION_CHUNK_BYTES // region.mine.element_size())
        scratch = torch.empty(min(step, last - first), dtype=region.mine.dtype)
        for start in range(first, last, step):
            chunk = slice(start, min(last, start + step))
            total = scratch[: chunk.stop - chunk.start]
            combine_in_rank_order([other[chunk] for other in region.everyones], op, out=total)
            for other in region.everyones:
                other[chunk].copy_(total)
        self.barrier()

    def reduce_scatter(self, parts: Sequence[Tensor], op: ReduceOp, out: Tensor) -> None:
        """Combine everyone's part number `rank` into `out` [n]; `parts`: one [n] tensor per rank."""
        for chunk in self._chunks(out.numel(), out.element_size(), self.size):
            length = chunk.stop - chunk.start
            staging = self._next_half(out.dtype)
            for rank, part in enumerate(parts):
                staging[self.rank][rank * length : (rank + 1) * length].copy_(part[chunk])
            self.barrier()
            own = slice(self.rank * length, (self.rank + 1) * length)
            combine_in_rank_order([half[own] for half in staging], op, out=out[chunk])
