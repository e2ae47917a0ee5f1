"""Which transports a group has: shared memory on each host, and one between the hosts."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from mpisgd import config
from mpisgd.core.interfaces import DigestExchange
from mpisgd.core.topology import Topology
from mpisgd.transport.cma.cross_memory_attach import open_cross_memory_attach
from mpisgd.transport.cma.transport import CmaTransport
from mpisgd.transport.internode.digest_exchange import InternodeDigestExchange
from mpisgd.transport.internode.leader_exchange import LeaderExchange
from mpisgd.transport.internode.transport import MEMORY_BYTES, InternodeTransport
from mpisgd.transport.ipc.segment import Segment, open_segment
from mpisgd.transport.messages.dissemination import Dissemination
from mpisgd.transport.shm.transport import STAGING_BYTES, ShmTransport

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["Transports", "open_transports"]


class Transports(NamedTuple):
    """What a group communicates through, besides MPI itself.

    Attributes:
        shm: the shared memory of the group, None unless all its ranks share one host and can have it.
        cma: its ranks' access to each other's memory, None where there is no `shm` or they have none.
        internode: the transport between several hosts, None on one.
        digest_exchange: how the ranks compare what they are about to do.
        local: the ranks of this host, where there is need of them.
    """

    shm: ShmTransport | None
    cma: CmaTransport | None
    internode: InternodeTransport | None
    digest_exchange: DigestExchange
    local: "Communicator | None"

    @property
    def memory(self) -> ShmTransport | None:
        """The shared memory of this host's ranks."""
        return self.shm if self.internode is None else self.internode.shm

    def close(self) -> None:
        """Free what MPI keeps for the exchange of digests, and the communicator of this host. Collective."""
        if isinstance(self.digest_exchange, InternodeDigestExchange):
            self.digest_exchange.close()  # a communicator with prepared messages is never freed
        if self.local is not None:
            self.local.free()


def open_transports(
    communicator: "Communicator",
    topology: Topology,
    best_num_leaders: Callable[[int, bool], int],
    *,
    name: str,
    timeout_s: float,
) -> Transports:
    """Open what a group can have. Collective. One rank warns where ranks of a host cannot share memory.

    Args:
        communicator: the group's communicator.
        topology: which of its ranks share a host.
        best_num_leaders: see `InternodeTransport`.
        name: of the group, for messages.
        timeout_s: how long to wait for the other ranks in the middle of an operation.
    """
    shares = any(len(ranks) > 1 for ranks in topology.nodes)
    allowed = all(communicator.all_gather_object(config.shared_memory()))
    if communicator.size == 1 or (shares and not allowed):
        return _messages_only(communicator)
    local = communicator.split(topology.node_rank)
    shm, memory = _open_memory(local, topology.num_nodes > 1, name, timeout_s)
    if not all(communicator.all_gather_object(shm is not None or local.size == 1)):
        _warn(communicator, name)
        local.free()
        return _messages_only(communicator)
    if topology.num_nodes == 1:
        assert shm is not None
        reachable = open_cross_memory_attach(local)
        cma = None if reachable is None else CmaTransport(shm, reachable)
        return Transports(shm, cma, None, shm.control, local)
    hosts = InternodeTransport(
        communicator, topology, shm, memory, best_num_leaders=best_num_leaders, name=name, timeout_s=timeout_s
    )
    return Transports(None, None, hosts, _between_hosts(communicator, topology, hosts), local)


def _messages_only(communicator: "Communicator") -> Transports:
    return Transports(
        None,
        None,
        None,
        InternodeDigestExchange(None, Dissemination(communicator), communicator.global_ranks[0]),
        None,
    )


def _open_memory(
    local: "Communicator", several_hosts: bool, name: str, timeout_s: float
) -> tuple[ShmTransport | None, Segment | None]:
    """Return the shared memory of a host's ranks, and more for what travels between hosts."""
    if local.size == 1:
        return None, None
    staging = open_segment(local, STAGING_BYTES)
    more = open_segment(local, MEMORY_BYTES) if several_hosts else None
    if staging is None or (several_hosts and more is None):
        return None, None
    return ShmTransport(local, staging, name=name, timeout_s=timeout_s), more


def _between_hosts(
    communicator: "Communicator", topology: Topology, hosts: InternodeTransport
) -> InternodeDigestExchange:
    first = [ranks[0] for ranks in topology.nodes]
    between: Dissemination | LeaderExchange | None = hosts.leader_exchange
    if between is None and communicator.rank in first:
        between = Dissemination(communicator, first)
    ranks = [communicator.global_ranks[rank] for rank in topology.nodes[topology.node_rank]]
    here = None if hosts.shm is None else hosts.shm.control
    return InternodeDigestExchange(here, between, ranks[0])


def _warn(communicator: "Communicator", name: str) -> None:
    if communicator.rank == 0:
        warnings.warn(
            f"ranks of group '{name}' share a host but no memory (separate containers?); everything goes "
            "through MPI instead, which is slower. MPISGD_SHARED_MEMORY=0 asks for that in silence",
            RuntimeWarning,
            stacklevel=2,
        )
