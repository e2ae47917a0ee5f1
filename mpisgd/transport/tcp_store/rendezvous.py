"""Rendezvous by TCP: which address of rank 0's host do all other ranks reach?

A host has several addresses, and some lead nowhere from outside (a bridge for containers) or somewhere else
(the same private address on every host). So nothing is guessed from names: rank 0 listens on each of its
addresses at a free port, the others try them all, and what counts is that rank 0 has received their token.
Once one address is chosen the others are closed, and a socket filter on this one admits only the job's hosts.
"""

import contextlib
import itertools
import os
import secrets
import selectors
import socket
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple

import psutil

from mpisgd.errors import Unreachable
from mpisgd.transport.tcp_store.socket_filter import admit_only

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["find_listener", "local_addresses"]

CONNECT_TIMEOUT_S = 2.0  # an unreachable address does not answer at all; TCP tries again after a second
TOKEN_BYTES = 16


class Endpoint(NamedTuple):
    """Where to connect to."""

    address: str
    port: int


class Listener(NamedTuple):
    """Where all ranks reach rank 0; `socket` is there on rank 0 only."""

    endpoint: Endpoint
    socket: "socket.socket | None"


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


def find_listener(communicator: "Communicator") -> Listener:
    """Return a listening socket of rank 0 that all ranks reach, and its address. Collective.

    Raises:
        Unreachable: there is none; on every rank.
    """
    listeners = _listen(local_addresses(), communicator.size) if communicator.rank == 0 else {}
    endpoints, token = communicator.broadcast_object((list(listeners), secrets.token_bytes(TOKEN_BYTES)), 0)
    attempts = _probe(endpoints, token) if communicator.rank != 0 else {}
    reached = communicator.all_gather_object(sorted(attempts))[1:]
    chosen = _reached_by_all(listeners, reached, token) if communicator.rank == 0 else None
    chosen = communicator.broadcast_object(chosen, 0)
    for endpoint, other in {**listeners, **attempts}.items():
        if endpoint != chosen or communicator.rank != 0:
            other.close()
    if chosen is None:
        raise Unreachable(_unreachable_text(endpoints, reached))
    return Listener(chosen, listeners.get(chosen))


def _listen(addresses: Sequence[str], backlog: int) -> dict[Endpoint, socket.socket]:
    """Listen on every address that can be had, at any free port."""
    listeners: dict[Endpoint, socket.socket] = {}
    for address in addresses:
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family, backlog=max(128, backlog))
            listeners[Endpoint(address, listener.getsockname()[1])] = listener
    return listeners


def _probe(endpoints: Sequence[Endpoint], token: bytes) -> dict[Endpoint, socket.socket]:
    """Connect to all endpoints at once and send the token; return the connections that came about."""
    reached: dict[Endpoint, socket.socket] = {}

    def connect(endpoint: Endpoint) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            connection = opened.enter_context(socket.create_connection(endpoint, CONNECT_TIMEOUT_S))
            connection.sendall(token)
            reached[endpoint] = connection
            opened.pop_all()

    with ThreadPoolExecutor(max(1, len(endpoints))) as threads:
        list(threads.map(connect, endpoints))
    return reached


def _reached_by_all(
    listeners: dict[Endpoint, socket.socket], reached: Sequence[Sequence[Endpoint]], token: bytes
) -> Endpoint | None:
    """Return the first endpoint that every other rank's token has reached; from then on only they get in."""
    for endpoint, listener in listeners.items():
        if all(endpoint in endpoints for endpoints in reached):
            addresses = _accept_ranks(listener, token, len(reached))
            if addresses is not None:
                _admit_only_ranks(listener, addresses)
                return endpoint
    return None


def _accept_ranks(listener: socket.socket, token: bytes, count: int) -> set[str] | None:
    """Return the addresses of `count` connections that sent the token, None if fewer have in time.

    Others may connect, too, and send nothing: all connections are read at once.
    """
    addresses: list[str] = []
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as connections:
        selector.register(listener, selectors.EVENT_READ)
        while len(addresses) < count and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):
                        connection, (address, *_) = listener.accept()
                        connections.enter_context(connection)
                        selector.register(connection, selectors.EVENT_READ, address)
                    continue
                selector.unregister(key.fileobj)
                with contextlib.suppress(OSError):
                    if os.read(key.fd, TOKEN_BYTES) == token:  # which is sent in one piece
                        addresses.append(key.data)
    return set(addresses) if len(addresses) >= count else None


def _admit_only_ranks(listener: socket.socket, addresses: set[str]) -> None:
    """Let only the hosts of the job connect: rank 0's own, and those that have shown the token."""
    own = listener.getsockname()[0]
    loopback = {"127.0.0.1"} if own.startswith("127.") else set()
    try:
        admit_only(listener, {*addresses, own, *loopback})
    except OSError as exc:
        warnings.warn(
            f"torch's store listens on {own} and cannot shut out other hosts: {exc}",
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
