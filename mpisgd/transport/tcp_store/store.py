"""`open_store`: the key-value store that torch's process groups find each other by, brought up over MPI.

torch wants an address and a free port from its user (MASTER_ADDR, MASTER_PORT). MPI has connected the ranks
already, so nobody needs to be asked: on one host the store is a file without a name; between hosts each rank
has a connection to rank 0. In neither case does anything listen on the network when the store is open.
"""

import datetime
import os
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import FileStore, Store

from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.transport.ipc.memfd import open_shared
from mpisgd.transport.tcp_store.links import LocalLink, RemoteLink, Server
from mpisgd.transport.tcp_store.network_store import NetworkStore
from mpisgd.transport.tcp_store.rendezvous import connect_ranks
from mpisgd.transport.tcp_store.table import Table

if TYPE_CHECKING:
    from mpisgd.core.topology import Topology

__all__ = ["open_store"]


def open_store(communicator: GroupCommunicator, topology: "Topology", timeout_s: float) -> Store:
    """Open a store that all ranks of `communicator` share. Collective.

    Args:
        communicator: the ranks; rank 0 serves the others where there are several hosts.
        topology: where they live.
        timeout_s: how long `get` and `wait` wait for a key that nobody has set.

    Raises:
        Unreachable: the hosts cannot reach rank 0's by TCP; on every rank.

    Cost: a file descriptor, between hosts one on rank 0 for each other rank. It stays open until the process
        ends: torch's threads may look into the store as long as they live, and a number that was closed could
        by then be another file.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    store = _in_file(communicator) if topology.num_nodes == 1 else None
    store = store or _over_network(communicator)
    store.set_timeout(timeout)
    return store


def _in_file(communicator: GroupCommunicator) -> Store | None:
    """Return a store in a memfd, None on all ranks if one of them cannot open it (separate containers)."""
    fd = open_shared(communicator, 0)
    if all(communicator.all_gather_object(fd >= 0)):
        # Every rank's own descriptor: the store outlives the rank that made the file.
        return FileStore(f"/proc/self/fd/{fd}", -1)
    if fd >= 0:
        os.close(fd)
    return None


def _over_network(communicator: GroupCommunicator) -> Store:
    """Return a store that rank 0 serves."""
    (address, _), connections = connect_ranks(communicator)
    if communicator.rank != 0:
        return NetworkStore(RemoteLink(connections[0]), address)
    table = Table()
    return NetworkStore(LocalLink(table, Server(table, connections)), address)
