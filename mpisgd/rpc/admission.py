"""`Admission`: who may connect to TensorPipe's listening sockets: the job's ranks, and later nobody.

TensorPipe takes whoever connects for a worker, and a worker may have any function called here. So no call of
a stranger may get that far. TensorPipe opens its sockets itself and asks nobody; the kernel lets the process
give them a filter all the same (`mpisgd.transport.tcp_store.socket_filter`), and reset connections that
TensorPipe has accepted. In the order in which RPC starts:

    TensorPipe listens       nobody is let in, and connections that are there already are reset. It has not
                             served them: it waits until the ranks know each other's addresses
    the ranks connect        from the addresses of the job's hosts, but what they send is dropped: TCP will
                             send it again. Each rank tells by MPI which connections it has made, and these
                             alone may send from now on
    all have connected       nobody is let in any more; connections that no rank has made are reset
"""

import contextlib
import time
from collections.abc import Iterable, Set

from mpisgd.errors import Unreachable
from mpisgd.rpc.tcp_sockets import (
    Endpoint,
    TcpSocket,
    disconnect,
    duplicate,
    list_connections,
    list_tcp_sockets,
    milliseconds_since_data,
    retransmit_steadily,
)
from mpisgd.transport.tcp_store.socket_filter import admit_data, admit_only, reject_pending

__all__ = ["Admission", "listening_endpoints", "made_connections"]

ACCEPTED_S = 5.0  # within which a connection that is being accepted has a descriptor, also on a busy machine
POLL_S = 0.001


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
        self._let_through: set[Endpoint] = set()

    @property
    def addresses(self) -> list[str]:
        """The addresses that RPC listens on."""
        return sorted({endpoint.address for endpoint in self.endpoints})

    def shut(self) -> None:
        """Let nobody connect from now on. Connections that there are stay."""
        self._attach((), data=True)

    def admit(self, addresses: Iterable[str]) -> None:
        """Let these addresses connect from now on, and send nothing yet. Connections that there are stay."""
        self._attach(set(addresses), data=False)

    def _attach(self, addresses: Iterable[str], *, data: bool) -> None:
        for found in list_tcp_sockets():
            if found.remote is None and found.local in self.endpoints:
                try:
                    with duplicate(found) as copy:
                        admit_only(copy, addresses, data=data)
                except OSError as exc:
                    raise Unreachable(
                        f"RPC listens on {found.local.address} and cannot shut out others, who could call "
                        f"any function here: {exc}. It needs Linux's socket filters; some sandboxes have none"
                    ) from exc

    def let_through(self, known: Set[Endpoint]) -> None:
        """Let the accepted connections send whose other end is `known`, a rank's."""
        for found in list_connections(self.endpoints):
            is_new = found.remote in known and found.remote not in self._let_through
            if found.remote is not None and is_new and found.fd >= 0:
                with contextlib.suppress(OSError), duplicate(found) as connection:
                    admit_data(connection)
                    self._let_through.add(found.remote)

    def accepted(self) -> list[TcpSocket]:
        """Return the connections that others have made to this rank."""
        return [found for found in list_tcp_sockets() if found.remote and found.local in self.endpoints]

    def reset_strangers(self, known: Set[Endpoint]) -> int:
        """Reset the connections whose other end is not `known`; return how many these were.

        When this returns, nothing that they have sent will be read. Call `shut` first: nobody may come anew.

        Raises:
            Unreachable: one cannot be reset.
        """
        number, deadline = 0, time.monotonic() + ACCEPTED_S
        while strangers := [found for found in list_connections(self.endpoints) if found.remote not in known]:
            for found in strangers:
                number += self._reset(found)
            if all(found.fd >= 0 for found in strangers):
                return number
            if time.monotonic() > deadline:
                raise Unreachable(f"RPC: connections from {strangers[0].remote} cannot be closed")
            self._reject_pending()
            time.sleep(POLL_S)
        return number

    def _reset(self, found: TcpSocket) -> bool:
        """Reset a connection, if it is accepted; return whether it was."""
        if found.fd < 0:
            return False
        with contextlib.suppress(OSError), duplicate(found) as connection:  # OSError: closed meanwhile
            disconnect(connection)
            return True
        return False

    def _reject_pending(self) -> None:
        for found in list_tcp_sockets():
            if found.remote is None and found.local in self.endpoints:
                with contextlib.suppress(OSError), duplicate(found) as listener:
                    reject_pending(listener)

    def seconds_since_data(self) -> float:
        """Return how long ago another rank has last sent something here; infinite where none is connected."""
        since_ms = [float("inf")]
        for found in self.accepted():
            with contextlib.suppress(OSError), duplicate(found) as connection:
                since_ms.append(milliseconds_since_data(connection))
        return min(since_ms) / 1000


def made_connections(endpoints: Set[Endpoint], known: Set[Endpoint]) -> set[Endpoint]:
    """Return this rank's end of the connections to these endpoints that it has made since those `known`."""
    made = [found for found in list_tcp_sockets() if found.remote in endpoints and found.local not in known]
    for found in made:
        with contextlib.suppress(OSError), duplicate(found) as connection:
            retransmit_steadily(connection)  # the other rank's socket drops what it sends yet
    return {found.local for found in made}
