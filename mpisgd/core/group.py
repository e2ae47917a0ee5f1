"""`Group`: some ranks of the job, with communicators, an order and a timeout of their own."""

import collections
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpisgd import config
from mpisgd.accelerator.own_streams import OwnStreams
from mpisgd.arguments import as_index, shown
from mpisgd.core.operation_queue import OperationQueue
from mpisgd.core.topology import Topology
from mpisgd.errors import InvalidRank, MpisgdError, NotInGroup, NotInitialized, PeerLost
from mpisgd.interfaces.host_transport import HostMemory, HostTransport
from mpisgd.interfaces.job import Job

__all__ = ["Group", "GroupResources"]


class GroupResources(NamedTuple):
    """What one member communicates with the others through; `mpisgd.job.group_factory` opens it.

    Attributes:
        queue: the order of the group's collectives.
        point_to_point: the group's messages: `close()`, `abandon(error)`, which fails what is in flight, and
            `abandon_devices(error)`, which ends it on devices.
        transports: how tensors in host memory move besides by MPI, the preferred one first.
        topology: which members share a host.
    """

    queue: OperationQueue
    point_to_point: Any
    transports: tuple[HostTransport, ...]
    topology: Topology


_groups: "weakref.WeakSet[Group]" = weakref.WeakSet()  # of this process


def _end_in_forked_process() -> None:
    for group in _groups:
        group._end_use()


os.register_at_fork(after_in_child=_end_in_forked_process)


class Group:
    """Ranks that communicate with each other; made by `mpisgd.new_group`, never directly.

    `src` and `dst` of every operation are ranks of the job (global ranks), as in torch.distributed.

    Attributes:
        name: for messages.
        ranks: the members' global ranks; place i holds group rank i.
        rank: this process's rank within the group, -1 if it is no member.
        size: number of members.
        job: the job of the group; set by `Job.add`.
        ordinal: index among the groups of the same ranks, in the order in which they were made; the same on
            all members.
        costs: predicts which algorithm is fastest among these ranks, a `mpisgd.tuning.CostModel`.
        device: the transport of tensors on a GPU; None before the first one.
        pg_options: options of its NCCL communicator, if they are not the job's.
        streams: its own streams on GPUs.
        known_calls: cached results of checks of calls that are repeated; empty once it may not be used.
        checks_staging: whether every operation is watched for what it writes before the ranks have agreed on
            it; see `mpisgd.collectives.staging_check`.
        num_owners: number of optimizers and other owners of operations on this group so far, by kind; see
            `mpisgd.core.owner`.
        made_for: objects that other modules keep with this group as long as it exists, by a key of their own.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], resources: GroupResources | None, *, costs: Any
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.job: Job
        self.ordinal = 0
        self.rank = -1 if resources is None else resources.topology.rank
        self.pid = os.getpid()
        self.costs = costs
        self.device: Any = None
        self.pg_options: Any = None
        self.streams = OwnStreams()
        self.known_calls: dict[Any, Any] = {}
        self.checks_staging = config.check_staging()
        self.num_owners: collections.Counter[str] = collections.Counter()
        # No `WeakKeyDictionary` of theirs: values that refer to the group would keep it for ever.
        self.made_for: dict[Any, Any] = {}
        self._resources = resources
        self._usable = resources  # None once they may not be used any more
        self._closed = False
        self._lost = ""
        _groups.add(self)

    def __repr__(self) -> str:
        return f"Group('{self.name}', ranks={list(self.ranks)}, rank={self.rank})"

    def __deepcopy__(self, memo: object) -> "Group":
        """A copy of a model communicates with the same ranks."""
        return self

    @property
    def is_usable(self) -> bool:
        """Whether this rank is a member, and the group was neither closed nor given up."""
        return self._usable is not None

    @property
    def broken(self) -> MpisgdError | None:
        """The error with which operations of this group fail, also after it was closed; None if they work."""
        return None if self._resources is None else self._resources.queue.broken

    @property
    def queue(self) -> OperationQueue:
        """The order of this group's collectives."""
        return self.resources.queue

    @property
    def point_to_point(self) -> Any:
        """The group's point-to-point messages."""
        return self.resources.point_to_point

    @property
    def topology(self) -> Topology:
        """Which members share a host."""
        return self.resources.topology

    @property
    def known_topology(self) -> Topology:
        """The topology, also of a group that was closed or abandoned."""
        assert self._resources is not None
        return self._resources.topology

    @property
    def transports(self) -> tuple[HostTransport, ...]:
        """The transports for host memory besides MPI, the preferred one first; the same on all ranks."""
        return self.resources.transports

    @property
    def spans_hosts(self) -> bool:
        """Whether its transports are for ranks on several hosts; the same on all ranks."""
        return any(transport.spans_hosts for transport in self.transports)

    @property
    def shares_memory(self) -> bool:
        """Whether members that are on one host see the same memory; the same on all ranks."""
        return any(transport.shares_memory for transport in self.transports)

    @property
    def host_memory(self) -> HostMemory | None:
        """The memory shared by the members on this host; None if there is no other member, or no shared
        memory.
        """
        return next((found.memory for found in self.transports if found.memory is not None), None)

    @property
    def shared_memory(self) -> HostMemory | None:
        """The memory shared by all members, if they are on one host; else None on all of them."""
        return None if self.spans_hosts else self.host_memory

    @property
    def resources(self) -> GroupResources:
        """The queue, the messages, the topology and the transports in one object; raises if not usable."""
        if self._usable is None:
            raise self._why_unusable()
        return self._usable

    def _end_use(self) -> None:
        """Let every use of this group raise from now on; known calls do not ask whether it may be used."""
        self._usable = None
        self.known_calls.clear()

    def _why_unusable(self) -> MpisgdError:
        if self._lost:
            return PeerLost(f"group '{self.name}' was abandoned: {self._lost}")
        if self._closed:
            return NotInitialized(f"group '{self.name}' was closed, by close_group() or shutdown()")
        if self.rank < 0:
            return NotInGroup(
                f"group '{self.name}' has the ranks {list(self.ranks)}; this rank is none of them"
            )
        return NotInitialized(
            f"this process was forked from rank {self.ranks[self.rank]} of the job: MPI cannot be used in it "
            "(DataLoader workers must not communicate)"
        )

    def group_rank(self, name: str, what: str, global_rank: int) -> int:
        """Return the group rank of a global rank.

        Args:
            name: the calling operation, for the error.
            what: the argument that has the rank, for the error.
            global_rank: rank of the job.

        Raises:
            InvalidRank: it is not in this group.
        """
        try:
            return self.ranks.index(as_index(global_rank))
        except (ValueError, TypeError):
            raise InvalidRank(
                f"{name}: {what}={shown(global_rank)} is not in group '{self.name}', which has the ranks "
                f"{_shortened(self.ranks)}"
            ) from None

    def abandon(self, reason: str) -> None:
        """Give this group up, since a rank of the job was lost. Sends nothing, and ends its threads.

        All its communicators have been revoked and all waits cancelled, so the threads end at once.
        """
        if self._resources is not None and (scope := self._resources.queue.scope) is not None:
            scope.end(PeerLost(reason))
        self._abandon(PeerLost(reason))
        self._lost = reason
        self._end_use()

    def leave(self) -> None:
        """Give this group up, since one of its operations has failed on some member. Sends nothing.

        MPI may still use its communicators and its memory, so they are kept.
        """
        self.queue.consistency.leave()
        self._abandon(NotInitialized(f"group '{self.name}' was destroyed"))
        self.queue.communicator.keep(self)
        self._closed = True
        self._end_use()

    def _abandon(self, error: MpisgdError) -> None:
        if self._resources is not None:
            queue = self._resources.queue
            queue.broken = queue.broken or error
            if self.device is not None:  # first: the queue's thread may wait for the GPU
                self.device.abandon(error)
            self._resources.point_to_point.abandon_devices(error)
            queue.drain()
            self._resources.point_to_point.abandon(error)

    def free(self) -> None:
        """Free what belongs to the group. Collective over the members; programs call `close_group`."""
        if self._resources is not None and (scope := self._resources.queue.scope) is not None:
            scope.close()
        if self.device is not None:
            self.device.close()
        if self._resources is not None:
            self._resources.point_to_point.close()
            self._resources.queue.consistency.digest_exchange.close()
            for transport in self._resources.transports:
                transport.close()
            self._resources.queue.communicator.free()
        self._closed = True
        self._end_use()


def _shortened(ranks: tuple[int, ...]) -> str:
    if ranks == tuple(range(len(ranks))) and len(ranks) > 1:
        return f"0 to {len(ranks) - 1}"
    return ", ".join(map(str, ranks))
