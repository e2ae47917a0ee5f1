"""`ShmTransport`: the staging memory of the ranks of a host, which all of them see, and their barrier.

What goes through it are generators (`mpisgd.transport.shm.reduction`, `.data_movement`) that yield wherever
all ranks must have arrived. Every operation begins with a consistency check: all ranks have left the one
before.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.errors import CollectiveTimeout
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.interfaces.host_transport import HostTransport, Steps
from mpisgd.interfaces.host_transport import Region as AnyRegion
from mpisgd.transport.ipc.control_block import CONTROL_BYTES, ControlBlock
from mpisgd.transport.ipc.segment import Segment, open_segment
from mpisgd.transport.members import Members
from mpisgd.transport.shm import data_movement, reduction
from mpisgd.transport.shm.at_once import (
    AT_ONCE_BYTES,
    AllGatherAtOnce,
    AllReduceAtOnce,
    BroadcastAtOnce,
    goes_at_once,
)
from mpisgd.transport.shm.region import Region, combine_chunks
from mpisgd.transport.shm.staging_memory import StagingMemory
from mpisgd.transport.staging_layout import BUFFER_BYTES

__all__ = ["ShmTransport", "open_host_memory"]

STAGING_BYTES = CONTROL_BYTES + 2 * BUFFER_BYTES


class ShmTransport(StagingMemory, HostTransport):
    """The staging memory of those ranks of a group that share this host; a `HostMemory`, too.

    Where all ranks are on this host, it takes every collective.

    Args:
        communicator: a communicator of these ranks, which it owns from now on.
        segment: shared by them, STAGING_BYTES for each.
        name: of the group, for messages.
        timeout_s: how long to wait for the others in the middle of an operation.

    Attributes:
        communicator: as given.
        control: the words through which they wait for each other.
    """

    name = "node"
    spans_hosts = False
    shares_memory = True

    def __init__(
        self, communicator: GroupCommunicator, segment: Segment, *, name: str, timeout_s: float
    ) -> None:
        shares = [segment.share(rank)[CONTROL_BYTES:] for rank in range(communicator.size)]
        super().__init__(
            [[share[i * BUFFER_BYTES : (i + 1) * BUFFER_BYTES] for share in shares] for i in (0, 1)],
            communicator.rank,
        )
        self.communicator = communicator
        self.control = ControlBlock(
            segment, communicator.rank, communicator.global_ranks, communicator.progress
        )
        self._name = name
        self._timeout_s = timeout_s

    @classmethod
    def open(cls, members: Members, opened: Sequence[HostTransport]) -> "ShmTransport | None":
        """Open it where all ranks are on one host; None on all of them if they cannot share memory."""
        if members.topology.num_nodes > 1:
            return None
        return open_host_memory(members)

    @property
    def memory(self) -> "ShmTransport":
        """This one."""
        return self

    @property
    def digest_exchange(self) -> ControlBlock:
        """Its control words."""
        return self.control

    def takes(self, collective: str, dtype: torch.dtype | None, nbytes: int) -> bool:
        """Everything."""
        return True

    def run_steps(self, steps: Steps) -> None:
        """Run an operation to its end, with a barrier wherever it yields."""
        for _ in steps:
            self.barrier()

    def barrier(self) -> None:
        """Wait for the ranks of this host, in the middle of an operation."""
        if not self.control.barrier(self._timeout_s):
            rank = self.communicator.global_ranks[self.rank]
            raise CollectiveTimeout(
                f"group '{self._name}': rank {rank} has waited {self._timeout_s:.1f} s in the middle of an "
                f"operation for {self.control.missing()}"
            )

    reduce = reduction.reduce
    reduce_scatter = reduction.reduce_scatter
    reduce_to_owners = reduction.reduce_to_owners
    broadcast = data_movement.broadcast
    gather = data_movement.gather
    scatter = data_movement.scatter
    all_gather = data_movement.all_gather
    all_to_all = data_movement.all_to_all
    all_to_all_equal = data_movement.all_to_all_equal
    exchange_spans = data_movement.exchange_spans

    def all_reduce(self, flat: Tensor, op: ReduceOp) -> Steps:
        """Combine `flat` [n] over the ranks, in place."""
        at_once = self.all_reduce_at_once(flat.numel(), flat.dtype, op)
        return reduction.all_reduce_in_parts(self, flat, op) if at_once is None else at_once.steps(flat)

    def all_reduce_at_once(self, numel: int, dtype: torch.dtype, op: ReduceOp) -> AllReduceAtOnce | None:
        """See `HostTransport`."""
        if not goes_at_once(numel * dtype.itemsize, self.size):
            return None
        return AllReduceAtOnce(self, numel, dtype, op)

    def broadcast_at_once(self, nbytes: int, root: int) -> BroadcastAtOnce | None:
        """See `HostTransport`."""
        return BroadcastAtOnce(self, nbytes, root) if nbytes <= AT_ONCE_BYTES else None

    def all_gather_at_once(self, nbytes: int) -> AllGatherAtOnce | None:
        """See `HostTransport`."""
        return AllGatherAtOnce(self, nbytes) if goes_at_once(nbytes, self.size) else None

    def all_reduce_now(self, flat: Tensor, op: ReduceOp, region: AnyRegion | None = None) -> None:
        """See `HostTransport`.

        In a region the owner of a part reads it from everyone and writes the result to everyone, in pieces
        that stay in its cache: reads and writes the message once per rank; one barrier.
        """
        if region is None:
            self.run_steps(self.all_reduce(flat, op))
            return
        assert isinstance(region, Region)
        combine_chunks(region.part_for_all, op)
        self.barrier()

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return everyone's object, in the order of the ranks of the host."""
        return self.communicator.all_gather_object(obj)

    def open_segment(self, nbytes: int) -> Segment | None:
        """Return new memory, `nbytes` for each rank, None on all of them if there is none. Collective."""
        return open_segment(self.communicator, nbytes)

    def open_region(self, numel: int, dtype: torch.dtype) -> Region | None:
        """Return a tensor [numel] per rank in new memory, None on all if there is none. Collective."""
        segment = self.open_segment(numel * dtype.itemsize)
        return None if segment is None else Region(segment, self.rank, self.size, numel, dtype)

    def close(self) -> None:
        """Free the communicator of the host. Collective."""
        self.communicator.free()


def open_host_memory(members: Members) -> ShmTransport | None:
    """Return the memory of this host's ranks; None where this one is alone, and where one cannot have it.

    Collective over the group.
    """
    local = members.communicator.split(members.topology.node_rank)
    segment = None if local.size == 1 else open_segment(local, STAGING_BYTES)
    if segment is None:
        local.free()
        return None
    return ShmTransport(local, segment, name=members.name, timeout_s=members.timeout_s)
