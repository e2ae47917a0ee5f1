"""Which planes a group has: shared memory on each host, and a way between the hosts."""

import warnings
from typing import TYPE_CHECKING, NamedTuple

from mpisgd import config
from mpisgd.comm.costs import CostModel
from mpisgd.comm.dissemination import Dissemination
from mpisgd.comm.handshake import Spread
from mpisgd.comm.hosts.plane import MEMORY_BYTES, HostsPlane
from mpisgd.comm.hosts.spread import HostsSpread
from mpisgd.comm.hosts.talk import Talk
from mpisgd.comm.node.cross_memory import open_cross_memory
from mpisgd.comm.node.plane import STAGING_BYTES, NodePlane
from mpisgd.comm.node.segment import Segment, open_segment
from mpisgd.comm.node.spread import NodeSpread
from mpisgd.comm.topology import Topology

if TYPE_CHECKING:
    from mpisgd.comm.mpi import Wire

__all__ = ["Planes", "open_planes"]


class Planes(NamedTuple):
    """What a group communicates through, besides MPI itself.

    Attributes:
        node: the shared memory of the group, None unless all its ranks share one host and can have it.
        hosts: the way between several hosts, None on one.
        spread: how the ranks compare what they are about to do.
        local: the ranks of this host, where there is need of them.
    """

    node: NodePlane | None
    hosts: HostsPlane | None
    spread: Spread
    local: "Wire | None"

    @property
    def memory(self) -> NodePlane | None:
        """The shared memory of this host's ranks."""
        return self.node if self.hosts is None else self.hosts.node


def open_planes(wire: "Wire", topology: Topology, costs: CostModel, *, name: str, timeout_s: float) -> Planes:
    """Open what a group can have. Collective.

    Shared memory that should be there and is not is worth a warning, from one rank.
    """
    shares = any(len(ranks) > 1 for ranks in topology.nodes)
    allowed = all(wire.all_gather_object(config.shared_memory()))
    if wire.size == 1 or (shares and not allowed):
        return _messages_only(wire)
    local = wire.split(topology.node_rank)
    node, memory = _open_memory(local, topology.num_nodes > 1, name, timeout_s)
    if not all(wire.all_gather_object(node is not None or local.size == 1)):
        _warn(wire, name)
        local.free()
        return _messages_only(wire)
    if topology.num_nodes == 1:
        assert node is not None
        return Planes(node, None, NodeSpread(node.control, wire.global_ranks), local)
    hosts = HostsPlane(
        wire, topology, node, memory, best_speakers=costs.speakers, name=name, timeout_s=timeout_s
    )
    return Planes(None, hosts, _between_hosts(wire, topology, hosts), local)


def _messages_only(wire: "Wire") -> Planes:
    return Planes(None, None, HostsSpread(None, Dissemination(wire), wire.global_ranks), None)


def _open_memory(
    local: "Wire", several_hosts: bool, name: str, timeout_s: float
) -> tuple[NodePlane | None, Segment | None]:
    """Return the shared memory of a host's ranks, and more for what travels between hosts."""
    if local.size == 1:
        return None, None
    staging = open_segment(local, STAGING_BYTES)
    more = open_segment(local, MEMORY_BYTES) if several_hosts else None
    if staging is None or (several_hosts and more is None):
        return None, None
    memory = None if several_hosts else open_cross_memory(local)
    return NodePlane(local, staging, memory, name=name, timeout_s=timeout_s), more


def _between_hosts(wire: "Wire", topology: Topology, hosts: HostsPlane) -> HostsSpread:
    first = [ranks[0] for ranks in topology.nodes]
    between: Dissemination | Talk | None = hosts.talk
    if between is None and wire.rank in first:
        between = Dissemination(wire, first)
    control = None if hosts.node is None else hosts.node.control
    here = [wire.global_ranks[rank] for rank in topology.nodes[topology.node_rank]]
    return HostsSpread(control, between, here)


def _warn(wire: "Wire", name: str) -> None:
    if wire.rank == 0:
        warnings.warn(
            f"ranks of group '{name}' share a host but no memory (separate containers?); everything goes "
            "through MPI instead, which is slower. MPISGD_SHARED_MEMORY=0 asks for that in silence",
            RuntimeWarning,
            stacklevel=2,
        )
