"""`Admission`: who may connect to TensorPipe's listening sockets: the job's hosts, and later nobody.

TensorPipe takes whoever connects for a worker, and a worker may have any function called here. So strangers
must not get that far. It opens its sockets itself and asks nobody; the kernel lets the process give them a
filter all the same (`mpisgd.transport.tcp_store.socket_filter`). In the order in which RPC starts:

    TensorPipe listens       nobody is let in; a connection that was there before the filter is a stranger's
    the ranks connect        the addresses from which the job's ranks come
    all have connected       nobody is let in any more; connections that no rank has made are a stranger's
"""

import contextlib
import socket
import warnings
from collections.abc import Iterable, Set

from mpisgd.rpc.tcp_sockets import (
    Endpoint,
    TcpSocket,
    duplicate,
    list_tcp_sockets,
    milliseconds_since_data,
)
from mpisgd.transport.tcp_store.socket_filter import admit_only

__all__ = ["Admission", "listening_endpoints", "made_connections"]


def listening_endpoints() -> set[Endpoint]:
    """Return where this process listens."""
    return {found.local for found in list_tcp_sockets() if found.remote is None}


class Admission:
    """The listening sockets of this rank's RPC, and the connections to them.

    Args:
        endpoints: where RPC listens.
    """

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self.endpoints = frozenset(endpoints)
        self._warned = False

    @property
    def addresses(self) -> list[str]:
        """The addresses that RPC listens on."""
        return sorted({endpoint.address for endpoint in self.endpoints})

    def admit(self, addresses: Iterable[str]) -> None:
        """Let only these addresses connect from now on. Connections that there are stay."""
        admitted = set(addresses)
        for found in list_tcp_sockets():
            if found.remote is None and found.local in self.endpoints:
                self._attach(found, admitted)

    def _attach(self, listener: TcpSocket, addresses: Set[str]) -> None:
        try:
            with duplicate(listener) as copy:
                admit_only(copy, addresses)
        except OSError as exc:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"RPC listens on {listener.local.address} and cannot shut out others: {exc}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def accepted(self) -> list[TcpSocket]:
        """Return the connections that others have made to this rank."""
        return [found for found in list_tcp_sockets() if found.remote and found.local in self.endpoints]

    def close_strangers(self, known: Set[Endpoint]) -> int:
        """End the accepted connections whose other end is not `known`; return how many these were."""
        strangers = [found for found in self.accepted() if found.remote not in known]
        for found in strangers:
            with contextlib.suppress(OSError), duplicate(found) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        return len(strangers)

    def seconds_since_data(self) -> float:
        """Return how long ago another rank has last sent something here; infinite where none is connected."""
        since_ms = [float("inf")]
        for found in self.accepted():
            with contextlib.suppress(OSError), duplicate(found) as connection:
                since_ms.append(milliseconds_since_data(connection))
        return min(since_ms) / 1000


def made_connections(endpoints: Set[Endpoint]) -> set[Endpoint]:
    """Return this rank's end of the connections that it has made to these endpoints."""
    return {found.local for found in list_tcp_sockets() if found.remote in endpoints}
