"""Which address of rank 0's host do all other ranks reach?

A host has several addresses, and some lead nowhere from outside (a bridge for containers) or somewhere else
(the same private address on every host). So nothing is guessed from names: rank 0 listens on each of its
addresses at a free port, the others try them all, and what counts is that rank 0 has received their token.
Once one address is chosen the others are closed, and on this one only the hosts of the job are heard.
"""

import array
import contextlib
import fcntl
import os
import secrets
import selectors
import socket
import struct
import time
import warnings
from collections.abc import Iterator, Sequence
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpisgd.errors import Unreachable
from mpisgd.transport.tcp_store.socket_filter import admit_only

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["find_listener", "local_addresses"]

REACH_S = 2.0  # an address that leads nowhere does not answer at all; TCP tries again after a second
TOKEN_BYTES = 16
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
GLOBAL_SCOPE = "00"


class Place(NamedTuple):
    """Where to connect to."""

    address: str
    port: int


class Listener(NamedTuple):
    """Where all ranks reach rank 0; `socket` is there on rank 0 only."""

    place: Place
    socket: "socket.socket | None"


def local_addresses() -> list[str]:
    """Return this host's addresses: IPv4, then IPv6, then its loopback (for ranks of the same host)."""
    names = [name for _, name in socket.if_nameindex()]
    found = [*filter(None, map(_ipv4_of, names)), *_ipv6()]
    return [*(address for address in found if not address.startswith("127.")), "127.0.0.1"]


def _ipv4_of(interface: str) -> str | None:
    request = array.array("B", struct.pack("256s", interface[:15].encode()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        fcntl.ioctl(asked.fileno(), SIOCGIFADDR, request)
        return socket.inet_ntoa(request[20:24].tobytes())
    return None


def _ipv6() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == GLOBAL_SCOPE:
                yield str(IPv6Address(bytes.fromhex(digits)))


def find_listener(wire: "Communicator") -> Listener:
    """Return a listening socket of rank 0 that all ranks reach, and its address. Collective.

    Raises:
        Unreachable: there is none; on every rank.
    """
    listeners = _listen(local_addresses(), wire.size) if wire.rank == 0 else {}
    places, token = wire.broadcast_object((list(listeners), secrets.token_bytes(TOKEN_BYTES)), 0)
    attempts = _knock(places, token) if wire.rank != 0 else {}
    reached = wire.all_gather_object(sorted(attempts))[1:]
    chosen = _heard_by_all(listeners, reached, token) if wire.rank == 0 else None
    chosen = wire.broadcast_object(chosen, 0)
    for place, other in {**listeners, **attempts}.items():
        if place != chosen or wire.rank != 0:
            other.close()
    if chosen is None:
        raise Unreachable(_complaint(places, reached))
    return Listener(chosen, listeners.get(chosen))


def _listen(addresses: Sequence[str], backlog: int) -> dict[Place, socket.socket]:
    """Listen on every address that can be had, at any free port."""
    listeners: dict[Place, socket.socket] = {}
    for address in addresses:
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, 0), family=family, backlog=max(128, backlog))
            listeners[Place(address, listener.getsockname()[1])] = listener
    return listeners


def _knock(places: Sequence[Place], token: bytes) -> dict[Place, socket.socket]:
    """Connect to all places at once and leave the token there; return the connections that came about."""
    reached: dict[Place, socket.socket] = {}
    under_way = {place: _begin(place) for place in places}
    deadline = time.monotonic() + REACH_S
    with selectors.DefaultSelector() as selector:
        for place, connection in under_way.items():
            selector.register(connection, selectors.EVENT_WRITE, place)
        while under_way and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                connection = under_way.pop(key.data)
                if _leave(connection, token):
                    reached[key.data] = connection
    for connection in under_way.values():
        connection.close()
    return reached


def _begin(place: Place) -> socket.socket:
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    connection.connect_ex(place)  # an error shows when the token is sent
    return connection


def _leave(connection: socket.socket, token: bytes) -> bool:
    """Return whether the token is on its way; a connection that failed says so here."""
    try:
        connection.sendall(token)
    except OSError:
        connection.close()
        return False
    return True


def _heard_by_all(
    listeners: dict[Place, socket.socket], reached: Sequence[Sequence[Place]], token: bytes
) -> Place | None:
    """Return the first place at which every other rank has left the token; from then on only they get in."""
    for place, listener in listeners.items():
        if not all(place in places for places in reached):
            continue
        visitors = _hear(listener, token, len(reached))
        if visitors is not None:
            _shut_out_others(listener, visitors)
            return place
    return None


def _hear(listener: socket.socket, token: bytes, count: int) -> set[str] | None:
    """Return the addresses of `count` visitors with the token, None if so many do not come.

    Others may connect, too, and send nothing: all connections are read at once.
    """
    heard: list[str] = []
    deadline = time.monotonic() + REACH_S
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as visitors:
        selector.register(listener, selectors.EVENT_READ)
        while len(heard) < count and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    with contextlib.suppress(OSError):
                        visitor, (address, *_) = listener.accept()
                        selector.register(visitors.enter_context(visitor), selectors.EVENT_READ, address)
                    continue
                selector.unregister(key.fileobj)
                if _received(key.fd, token):
                    heard.append(key.data)
    return set(heard) if len(heard) >= count else None


def _received(fd: int, token: bytes) -> bool:
    """Return whether the token, which is sent in one piece, is what a connection begins with."""
    try:
        return os.read(fd, TOKEN_BYTES) == token
    except OSError:
        return False


def _shut_out_others(listener: socket.socket, addresses: set[str]) -> None:
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


def _complaint(places: Sequence[Place], reached: Sequence[Sequence[Place]]) -> str:
    """Say how many ranks reached which address."""
    counts = {place: sum(place in mine for mine in reached) for place in places}
    told = ", ".join(f"{place.address} ({counts[place]} of {len(reached)})" for place in places)
    return (
        "the hosts of the job cannot reach rank 0's by TCP, as torch's process groups need it; its addresses "
        f"and how many other ranks reached them: {told or 'none'}. A firewall between the hosts?"
    )
