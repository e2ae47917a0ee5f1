"""`Group`: some ranks of the job, with communicators, an order and a time limit of their own."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpisgd.comm.dissemination import Dissemination
from mpisgd.comm.lane import Lane
from mpisgd.comm.mailbox import Mailbox
from mpisgd.comm.node.plane import NodePlane, open_plane
from mpisgd.comm.node.spread import NodeSpread
from mpisgd.comm.topology import Topology, discover
from mpisgd.errors import InvalidRank, NotInGroup, NotInitialized

if TYPE_CHECKING:
    from mpisgd.comm.mpi import Wire

__all__ = ["Group"]


class Group:
    """Ranks that communicate with each other; made by `mpisgd.new_group`, never directly.

    `src` and `dst` of every operation are ranks of the job (global ranks), as in torch.distributed.

    Attributes:
        name: for messages.
        ranks: the members' global ranks; place i holds group rank i.
        rank: this process within the group, -1 when it is no member.
        size: number of members.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], wire: "Wire | None", *, timeout_s: float, threads: bool
    ):
        self.name = name
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = -1 if wire is None else wire.rank
        self.pid = os.getpid()
        self._closed = False
        self._lane: Lane | None = None
        self._mailbox: Mailbox | None = None
        self._topology: Topology | None = None
        self._plane: NodePlane | None = None
        if wire is not None:
            self._topology = discover(wire)
            self._plane = open_plane(wire, self._topology, name=name, timeout_s=timeout_s)
            spread = Dissemination(wire) if self._plane is None else NodeSpread(self._plane.control)
            self._lane = Lane(wire, spread, name=name, timeout_s=timeout_s, threads_allowed=threads)
            self._mailbox = Mailbox(wire.duplicate(), timeout_s=timeout_s, threads_allowed=threads)

    def __repr__(self) -> str:
        return f"Group('{self.name}', ranks={list(self.ranks)}, rank={self.rank})"

    @property
    def lane(self) -> Lane:
        """The order of this group's collectives."""
        self._need_membership()
        assert self._lane is not None
        return self._lane

    @property
    def mailbox(self) -> Mailbox:
        """The group's point-to-point messages."""
        self._need_membership()
        assert self._mailbox is not None
        return self._mailbox

    @property
    def topology(self) -> Topology:
        """Which members share a host."""
        self._need_membership()
        assert self._topology is not None
        return self._topology

    @property
    def plane(self) -> NodePlane | None:
        """The shared memory of the group, None unless all its ranks share one host and can have it."""
        self._need_membership()
        return self._plane

    def _need_membership(self) -> None:
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
            return self.ranks.index(global_rank)
        except ValueError:
            raise InvalidRank(
                f"{name}: {what}={global_rank!r} is not in group '{self.name}', which has the ranks "
                f"{_shortened(self.ranks)}"
            ) from None

    def close(self) -> None:
        """Free the communicators. Collective over the members."""
        if self._lane is not None and self._mailbox is not None:
            self._mailbox.wire.free()
            self._lane.wire.free()
        self._closed = True


def _shortened(ranks: tuple[int, ...]) -> str:
    if ranks == tuple(range(len(ranks))) and len(ranks) > 1:
        return f"0 to {len(ranks) - 1}"
    return ", ".join(map(str, ranks))
