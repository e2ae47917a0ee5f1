"""`Group`: some ranks of the job, with communicators, an order and a time limit of their own."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpisgd.arguments import as_index, shown
from mpisgd.core.operation_queue import OperationQueue
from mpisgd.core.topology import Topology, discover
from mpisgd.errors import InvalidRank, MpisgdError, NotInGroup, NotInitialized, PeerLost
from mpisgd.tracing import Track
from mpisgd.transport.internode.transport import InternodeTransport
from mpisgd.transport.messages.point_to_point import PointToPoint
from mpisgd.transport.shm.transport import ShmTransport
from mpisgd.transport.transports import Transports, open_transports
from mpisgd.tuning import CostModel

if TYPE_CHECKING:
    from mpisgd.transport.device.transport import DeviceTransport
    from mpisgd.transport.mpi import Communicator

__all__ = ["Group"]

_left: "list[Group]" = []  # until the process ends: MPI may still write to their memory


class Group:
    """Ranks that communicate with each other; made by `mpisgd.new_group`, never directly.

    `src` and `dst` of every operation are ranks of the job (global ranks), as in torch.distributed.

    Attributes:
        name: for messages.
        ranks: the members' global ranks; place i holds group rank i.
        rank: this process within the group, -1 when it is no member.
        size: number of members.
        ordinal: among the groups of the same ranks, counted as they are made; the same on all members.
        costs: predicts which algorithm is fastest among these ranks.
        device: the way of tensors on a GPU; None before there were any.
        known_calls: what collectives have found out about calls that come again and again.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        wire: "Communicator | None",
        *,
        timeout_s: float,
        threads: bool,
        topology: Topology | None = None,
        costs: CostModel | None = None,
    ):
        self.name = name
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.ordinal = 0
        self.rank = -1 if wire is None else wire.rank
        self.pid = os.getpid()
        self._closed = False
        self._lost = ""
        self._queue: OperationQueue | None = None
        self._point_to_point: PointToPoint | None = None
        self._topology: Topology | None = None
        self._transports: Transports | None = None
        self.costs = costs or CostModel("none", ())
        self.device: DeviceTransport | None = None
        self.known_calls: dict[Any, Any] = {}
        if wire is not None:
            self._topology = topology or discover(wire)
            self.costs = self.costs.at(self._topology.ranks_per_host)
            self._transports = open_transports(
                wire, self._topology, self.costs, name=name, timeout_s=timeout_s
            )
            self._queue = OperationQueue(
                wire, self._transports.spread, name=name, timeout_s=timeout_s, threads_allowed=threads
            )
            self._queue.track = Track(f"group {name}", self.ranks)
            if self._transports.cma is not None:
                self._queue.when_left = self._transports.cma.access.revoke
            self._point_to_point = PointToPoint(
                wire.duplicate(), timeout_s=timeout_s, threads_allowed=threads
            )
            self._point_to_point.group = (name, self.ranks)

    def __repr__(self) -> str:
        return f"Group('{self.name}', ranks={list(self.ranks)}, rank={self.rank})"

    def __deepcopy__(self, memo: object) -> "Group":
        """A copy of a model communicates with the same ranks."""
        return self

    @property
    def is_open(self) -> bool:
        """Return whether this rank is a member and the group was not closed."""
        return self.rank >= 0 and not self._closed

    @property
    def queue(self) -> OperationQueue:
        """The order of this group's collectives."""
        self._need_membership()
        assert self._queue is not None
        return self._queue

    @property
    def point_to_point(self) -> PointToPoint:
        """The group's point-to-point messages."""
        self._need_membership()
        assert self._point_to_point is not None
        return self._point_to_point

    @property
    def topology(self) -> Topology:
        """Which members share a host."""
        self._need_membership()
        assert self._topology is not None
        return self._topology

    @property
    def known_topology(self) -> Topology:
        """The same, also of a group that is no more."""
        assert self._topology is not None
        return self._topology

    @property
    def transports(self) -> Transports:
        """What the group communicates through besides MPI itself."""
        self._need_membership()
        assert self._transports is not None
        return self._transports

    @property
    def shm(self) -> ShmTransport | None:
        """The shared memory of the group, None unless all its ranks share one host and can have it."""
        return self.transports.shm

    @property
    def internode(self) -> InternodeTransport | None:
        """The way between the group's hosts, None where there is one host only."""
        return self.transports.internode

    def _need_membership(self) -> None:
        if self._lost:
            raise PeerLost(f"group '{self.name}' is no more: {self._lost}")
        if self._closed:
            raise NotInitialized(f"group '{self.name}' was closed by mpisgd.shutdown()")
        if self.rank < 0:
            raise NotInGroup(
                f"group '{self.name}' has the ranks {list(self.ranks)}; this rank is none of them"
            )
        if self.pid != os.getpid():
            raise NotInitialized(
                f"this process was forked from rank {self.ranks[self.rank]} of the job: MPI cannot be used "
                "in it (a DataLoader's workers must not communicate)"
            )

    def group_rank(self, name: str, what: str, global_rank: int) -> int:
        """Return the place of a global rank in this group; `name` and `what` go into the error."""
        try:
            return self.ranks.index(as_index(global_rank))
        except (ValueError, TypeError):
            raise InvalidRank(
                f"{name}: {what}={shown(global_rank)} is not in group '{self.name}', which has the ranks "
                f"{_shortened(self.ranks)}"
            ) from None

    def give_up(self, reason: str) -> None:
        """Let this group be: a rank of the job was lost. Meets nobody; returns when its threads have ended.

        All its communicators have been revoked, and nobody waits any more, so they end at once.
        """
        self._let_be(PeerLost(reason))
        self._lost = reason

    def leave(self) -> None:
        """Let this group be: an operation of it has failed on some member. Meets nobody.

        MPI may be in the middle of something in it, so its communicators and its memory are kept.
        """
        self.queue.consistency.leave()
        self._let_be(NotInitialized(f"group '{self.name}' was destroyed"))
        self._closed = True
        _left.append(self)

    def _let_be(self, error: MpisgdError) -> None:
        if self._queue is not None and self._point_to_point is not None:
            self._queue.broken = self._queue.broken or error
            self._queue.drain()
            self._point_to_point.give_up(error)

    def close(self) -> None:
        """Free the communicators. Collective over the members."""
        if self.device is not None:
            self.device.close()
        if self._queue is not None and self._point_to_point is not None:
            self._point_to_point.wire.free()
            if self._transports is not None and self._transports.local is not None:
                self._transports.local.free()
            self._queue.wire.free()
        self._closed = True


def _shortened(ranks: tuple[int, ...]) -> str:
    if ranks == tuple(range(len(ranks))) and len(ranks) > 1:
        return f"0 to {len(ranks) - 1}"
    return ", ".join(map(str, ranks))
