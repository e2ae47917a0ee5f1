"""Where the ranks of a communicator live: which host, which place on it."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from mpisgd import config
from mpisgd.interfaces.communicator import Communicator

__all__ = ["Topology", "discover"]


@dataclass(frozen=True)
class Topology:
    """The ranks of a group, by host.

    Attributes:
        rank: this process.
        nodes: the ranks of each host, ascending; hosts are ordered by their lowest rank.
        hostnames: one per host.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    hostnames: tuple[str, ...]

    def subset(self, members: Sequence[int]) -> "Topology":
        """Return the topology of a group of some of these ranks, this one among them.

        Args:
            members: their order is the order of the group's ranks.
        """
        host_of = {rank: host for host, ranks in enumerate(self.nodes) for rank in ranks}
        first_on: dict[int, int] = {}
        leaders = [first_on.setdefault(host_of[rank], i) for i, rank in enumerate(members)]
        names = [self.hostnames[host_of[rank]] for rank in members]
        return arrange(list(members).index(self.rank), leaders, names)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return len(self.nodes)

    @property
    def ranks_per_host(self) -> tuple[int, ...]:
        """Number of ranks of each host."""
        return tuple(map(len, self.nodes))

    @property
    def node_rank(self) -> int:
        """The host of this rank, counted from 0."""
        return next(i for i, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """The place of this rank among those of its host."""
        return self.nodes[self.node_rank].index(self.rank)

    @property
    def local_size(self) -> int:
        """How many ranks share this rank's host."""
        return len(self.nodes[self.node_rank])


def arrange(rank: int, leaders: Sequence[int], hostnames: Sequence[str]) -> Topology:
    """Build the topology from one entry per rank: the lowest rank of its host, and the host's name."""
    nodes: dict[int, list[int]] = {}
    for member, leader in enumerate(leaders):
        nodes.setdefault(leader, []).append(member)
    return Topology(
        rank, tuple(tuple(ranks) for ranks in nodes.values()), tuple(hostnames[leader] for leader in nodes)
    )


def discover(communicator: Communicator) -> Topology:
    """Find out which ranks share memory. Collective.

    MPISGD_RANKS_PER_HOST divides the ranks of a host further, as if they were on several.
    """
    local = communicator.same_host()
    leader = min(local.all_gather_object(communicator.rank))
    local.free()
    count = config.ranks_per_host()
    part = communicator.global_ranks[communicator.rank] // count if count else 0
    seen = communicator.all_gather_object(((leader, part), socket.gethostname()))
    first_on: dict[tuple[int, int], int] = {}
    leaders = [first_on.setdefault(host, rank) for rank, (host, _) in enumerate(seen)]
    return arrange(communicator.rank, leaders, [name for _, name in seen])
