"""Plain TCP between hosts: their addresses, and what the network carries with nothing in between.

MPI sends one message after the other through a connection that both directions share with the process's own
progress; under load that takes up to twice the link's time, which is no limit. Here the kernel sends while
it receives.
"""

import contextlib
import functools
import ipaddress
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil

import mpisgd
from mpisgd.job.lifecycle import world
from mpisgd.job.rank_info import topology
from mpisgd.transport.tcp_store.handshake import SECRET_BYTES, Endpoint, Reception, greet
from mpisgd.transport.tcp_store.rendezvous import find_listener

__all__ = ["Interface", "Ring", "interface_to", "open_ring"]

RECEIVE_BYTES = 2**20
CONNECT_LIMIT_S = 30.0


class Interface(NamedTuple):
    """A network interface of this host, with one of its addresses."""

    name: str
    address: str


def interface_to(address: str) -> Interface:
    """Return the interface through which this host reaches an address; its own one for an own address."""
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 1))  # sends nothing: the kernel looks up the route
        own = str(sock.getsockname()[0])
    names = [
        name for name, found in psutil.net_if_addrs().items() if own in (entry.address for entry in found)
    ]
    return Interface(names[0], own)


Ring = Callable[[memoryview, memoryview], None]  # sends one to the next host while it fills the other


def _pass_on(after: socket.socket, before: socket.socket, give: memoryview, take: memoryview) -> None:
    """Send `give` to the next host while as much comes in from the one before."""
    sender = threading.Thread(target=_send, args=(after, give))
    sender.start()
    got = 0
    try:
        while got < len(take):
            received = before.recv_into(take[got : got + RECEIVE_BYTES])
            if received == 0:
                raise ConnectionResetError("the host before this one in the ring has closed its connection")
            got += received
    finally:
        sender.join(CONNECT_LIMIT_S)


def _send(after: socket.socket, give: memoryview) -> None:
    with contextlib.suppress(OSError):  # the next host is gone: this one sees so where it receives
        after.sendall(give)


@contextlib.contextmanager
def open_ring() -> Iterator[Ring | None]:
    """Connect the hosts' leaders; None in the other ranks, and where hosts share no network. Collective."""
    here = topology()
    own = _own_address() if here.num_nodes > 1 else None
    if own is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        listener, address = None, Endpoint("", 0)
        secrets_of_ranks = [b""] * mpisgd.size()
        mpisgd.all_gather_object(secrets_of_ranks, secrets.token_bytes(SECRET_BYTES))
        secret = secrets_of_ranks[0]
        if here.local_rank == 0:
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            listener = stack.enter_context(socket.create_server((own, 0), family=family))
            address = Endpoint(*listener.getsockname()[:2])
        addresses = [address] * mpisgd.size()
        mpisgd.all_gather_object(addresses, address)
        if listener is None:
            yield None
            return
        next_leader = here.nodes[(here.node_rank + 1) % here.num_nodes][0]
        last_leader = here.nodes[(here.node_rank - 1) % here.num_nodes][0]
        reception = Reception({address: listener}, secret, [last_leader])
        try:
            after = stack.enter_context(socket.create_connection(addresses[next_leader], CONNECT_LIMIT_S))
            greet(after, secret, mpisgd.rank(), addresses[next_leader])
            before = stack.enter_context(reception.wait_for(address, last_leader, CONNECT_LIMIT_S))
        finally:
            reception.close()
        for connection in (after, before):
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield functools.partial(_pass_on, after, before)


def _own_address() -> str | None:
    """Return an address of this host on the way to rank 0's; None if that cannot be reached. Collective."""
    try:
        (address, _), listener = find_listener(world().queue.communicator)
    except mpisgd.Unreachable:
        return None
    if listener is not None:
        listener.close()
    return interface_to(address).address
