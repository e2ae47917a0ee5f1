"""Rendezvous by TCP: which address of rank 0's host do all other ranks reach?

A host has several addresses, and some lead nowhere from outside (a bridge for containers) or somewhere else
(the same private address on every host). So nothing is guessed from names: rank 0 listens on each of its
addresses at a free port, the others try them all, and what counts is that both ends have proved to each other
that they know the secret which MPI has brought (`mpisgd.transport.tcp_store.handshake`). Once one address is
chosen all listeners are closed: nobody can connect any more.
"""

import contextlib
import itertools
import secrets
import socket
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import NamedTuple

import psutil

from mpisgd.errors import Unreachable
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.transport.tcp_store.handshake import SECRET_BYTES, Endpoint, Reception, greet
from mpisgd.transport.tcp_store.socket_filter import admit_only

__all__ = ["Endpoint", "Meeting", "connect_ranks", "find_listener", "local_addresses"]

CONNECT_TIMEOUT_S = 2.0  # an unreachable address does not answer at all; TCP tries again after a second
ANSWER_TIMEOUT_S = 5.0


class Listener(NamedTuple):
    """Where all ranks reach rank 0; `socket` is there on rank 0 only."""

    endpoint: Endpoint
    socket: "socket.socket | None"


class Meeting(NamedTuple):
    """Connections between rank 0 and each other rank, each authenticated by both ends.

    Attributes:
        endpoint: where rank 0 has listened.
        connections: on rank 0 by the other end's rank; elsewhere that to rank 0.
    """

    endpoint: Endpoint
    connections: dict[int, socket.socket]


def local_addresses() -> list[str]:
    """Return this host's addresses: IPv4, then IPv6, then its loopback (for ranks of the same host).

    Those that mean nothing without their interface are left out: a loopback's, and IPv6's local ones.
    """
    found: dict[int, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    for entry in itertools.chain.from_iterable(psutil.net_if_addrs().values()):
        if entry.family in found:
            plain = ip_address(entry.address.partition("%")[0])
            if not (plain.is_loopback or (plain.version == 6 and plain.is_link_local)):
                found[entry.family].append(entry.address)
    return [*found[socket.AF_INET], *found[socket.AF_INET6], "127.0.0.1"]


def connect_ranks(communicator: GroupCommunicator) -> Meeting:
    """Connect every other rank with rank 0; nobody listens any more when this returns. Collective.

    Raises:
        Unreachable: the ranks cannot reach rank 0 at any of its addresses; on every rank.
    """
    meeting, listener = _meet(communicator)
    if listener is not None:
        listener.close()
    return meeting


def find_listener(communicator: GroupCommunicator) -> Listener:
    """Return a listening socket of rank 0 that all ranks reach, and its address. Collective.

    It receives from the hosts of the job alone, but from any process there: who accepts has to ask each one
    for a proof.

    Raises:
        Unreachable: there is none; on every rank.
    """
    meeting, listener = _meet(communicator)
    addresses = {connection.getpeername()[0] for connection in meeting.connections.values()}
    for connection in meeting.connections.values():
        connection.close()
    if listener is not None:
        _admit_only_hosts(listener, addresses)
        listener.setblocking(True)
    return Listener(meeting.endpoint, listener)


def _meet(communicator: GroupCommunicator) -> tuple[Meeting, "socket.socket | None"]:
    """Return the connections, and rank 0's listener by which they came. Collective."""
    here = communicator.rank
    listeners = _listen(local_addresses(), communicator.size) if here == 0 else {}
    endpoints, secret = communicator.broadcast_object((list(listeners), secrets.token_bytes(SECRET_BYTES)), 0)
    reception = Reception(listeners, secret, range(1, communicator.size)) if here == 0 else None
    attempts = _probe(endpoints, secret, here) if here != 0 else {}
    reached = communicator.all_gather_object(sorted(attempts))[1:]
    arrived: dict[Endpoint, dict[int, socket.socket]] = {}
    if reception is not None:
        reception.close()
        arrived = reception.arrived
    chosen = next((place for place in endpoints if all(place in theirs for theirs in reached)), None)
    for endpoint, connection in attempts.items():
        if endpoint != chosen:
            connection.close()
    for endpoint, listener in listeners.items():
        if endpoint != chosen:
            listener.close()
            for connection in arrived[endpoint].values():
                connection.close()
    if chosen is None:
        raise Unreachable(_unreachable_text(endpoints, reached))
    connections = arrived[chosen] if here == 0 else {0: attempts[chosen]}
    return Meeting(chosen, connections), listeners.get(chosen)


def _listen(addresses: Sequence[str], backlog: int) -> dict[Endpoint, socket.socket]:
    """Listen on every address that can be had, at any free port."""
    listeners: dict[Endpoint, socket.socket] = {}
    for address in addresses:
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family, backlog=max(128, backlog))
            listeners[Endpoint(address, listener.getsockname()[1])] = listener
    return listeners


def _probe(endpoints: Sequence[Endpoint], secret: bytes, rank: int) -> dict[Endpoint, socket.socket]:
    """Connect to all endpoints at once; return the connections of which both ends have proved themselves."""
    reached: dict[Endpoint, socket.socket] = {}

    def connect(endpoint: Endpoint) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            connection = opened.enter_context(socket.create_connection(endpoint, CONNECT_TIMEOUT_S))
            connection.settimeout(ANSWER_TIMEOUT_S)
            greet(connection, secret, rank, endpoint)
            connection.settimeout(None)
            reached[endpoint] = connection
            opened.pop_all()

    with ThreadPoolExecutor(max(1, len(endpoints))) as threads:
        list(threads.map(connect, endpoints))
    return reached


def _admit_only_hosts(listener: socket.socket, addresses: set[str]) -> None:
    """Let only the hosts of the job connect: rank 0's own, and those of the other ranks."""
    own = listener.getsockname()[0]
    loopback = {"127.0.0.1"} if own.startswith("127.") else set()
    try:
        admit_only(listener, {*addresses, own, *loopback})
    except OSError as exc:
        warnings.warn(
            f"a socket listens on {own} and cannot shut out other hosts: {exc}",
            RuntimeWarning,
            stacklevel=2,
        )


def _unreachable_text(endpoints: Sequence[Endpoint], reached: Sequence[Sequence[Endpoint]]) -> str:
    """Say how many ranks reached which address."""
    counts = {endpoint: sum(endpoint in mine for mine in reached) for endpoint in endpoints}
    told = ", ".join(f"{endpoint.address} ({counts[endpoint]} of {len(reached)})" for endpoint in endpoints)
    return (
        "the hosts of the job cannot reach rank 0's by TCP, as torch's process groups need it; its addresses "
        f"and how many other ranks reached them: {told or 'none'}. A firewall between the hosts?"
    )
