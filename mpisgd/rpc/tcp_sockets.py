"""The TCP sockets of this process, also those that a library keeps to itself, as TensorPipe does.

The kernel lists all TCP connections in /proc/self/net, each with the number of its socket, and /proc/self/fd
tells which of these are this process's own. Through a duplicate of its descriptor a socket can be given a
filter, asked when it has last received something, or disconnected.

TensorPipe by itself listens on whatever address the host's name stands for. It takes the name of an interface
from TP_SOCKET_IFNAME, the first time that it listens in a process: loopback on one host, else the interface
towards rank 0.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

import psutil
from torch._C._distributed_c10d import Store

from mpisgd.errors import Unreachable
from mpisgd.transport.tcp_store.network_store import NetworkStore

__all__ = [
    "ESTABLISHED",
    "VARIABLE",
    "Endpoint",
    "TcpSocket",
    "choose_interface",
    "disconnect",
    "duplicate",
    "list_connections",
    "list_tcp_sockets",
    "milliseconds_since_data",
    "preferred_interface",
    "retransmit_steadily",
    "source_address",
]

VARIABLE = "TP_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
DISCARD_PORT = 9  # of a datagram socket that sends nothing


def choose_interface(store: Store) -> str:
    """Return the name of the interface on which the ranks that share a store reach this one.

    Args:
        store: in a file on one host; else one of which all ranks have reached rank 0's address
            (`mpisgd.transport.tcp_store.rendezvous`), and by the same way rank 0's host reaches them.
    """
    address = source_address(store.host) if isinstance(store, NetworkStore) else LOOPBACK
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    raise Unreachable(f"init_rpc: no network interface of this host has the address {address}")


def source_address(destination: str) -> str:
    """Return this host's address from which connections to `destination` go out. Sends nothing."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((destination, DISCARD_PORT))
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def preferred_interface(name: str) -> Iterator[None]:
    """Have TensorPipe listen on an interface, unless the user has named another."""
    if VARIABLE in os.environ:
        yield
        return
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        del os.environ[VARIABLE]


TABLES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6}
LISTENS, ESTABLISHED = "0A", "01"  # of the kernel's states
NOTHING_TO_READ = {"03", "06", "07"}  # half open, waiting for the end, closed
LOCAL, REMOTE, STATE, INODE = 1, 2, 3, 9  # columns
TCP_THIN_LINEAR_TIMEOUTS = 16  # of Linux, which Python has no name for
LAST_DATA_RECEIVED = 52  # offset in the kernel's tcp_info, in milliseconds


class Endpoint(NamedTuple):
    """One end of a connection."""

    address: str
    port: int


class TcpSocket(NamedTuple):
    """A socket of this process.

    Attributes:
        fd: its descriptor; -1 while the kernel has not handed it over yet.
        local: where it listens, or this end of its connection.
        remote: the other end; None of one that listens.
    """

    fd: int
    local: Endpoint
    remote: Endpoint | None


def list_tcp_sockets() -> list[TcpSocket]:
    """Return the sockets of this process that listen or are connected."""
    return [found for state, found in _sockets() if state in (LISTENS, ESTABLISHED) and found.fd >= 0]


def list_connections(locals_: Set[Endpoint]) -> list[TcpSocket]:
    """Return the connections to some places where this process listens, from which something may be read.

    Those whose other end has closed are among them: what it had sent is still there. And those that wait to
    be accepted, or are about to be: they have no descriptor.
    """
    return [
        found
        for state, found in _sockets()
        if found.remote and found.local in locals_ and state not in NOTHING_TO_READ
    ]


def _sockets() -> Iterator[tuple[str, TcpSocket]]:
    """Yield the TCP sockets of this network namespace and their states; others' without descriptor."""
    descriptors = _socket_descriptors()
    for table, family in TABLES.items():
        for entry in _entries(table):
            remote = None if entry[STATE] == LISTENS else _endpoint(entry[REMOTE], family)
            fd = descriptors.get(entry[INODE], -1)
            yield entry[STATE], TcpSocket(fd, _endpoint(entry[LOCAL], family), remote)


def _entries(table: str) -> Iterator[list[str]]:
    """Yield the columns of each connection in one of the kernel's tables; none where it has no such table."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            yield line.split()


def _socket_descriptors() -> dict[str, int]:
    """Return this process's descriptors of sockets, by the socket's number."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile, such as that of the listing itself
            kind, _, inode = os.readlink(f"/proc/self/fd/{fd}").partition(":[")
            if kind == "socket":
                found[inode.rstrip("]")] = fd
    return found


def _endpoint(text: str, family: socket.AddressFamily) -> Endpoint:
    """Return the address and port of a text that has hexadecimal words in the machine's byte order."""
    address, port = text.split(":")
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    return Endpoint(socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16))


@contextlib.contextmanager
def duplicate(found: TcpSocket) -> Iterator[socket.socket]:
    """Yield a socket object for a socket that another library owns; closes the duplicate alone.

    It does not block: a change of that would be one of the owner's socket too.

    Raises:
        OSError: the owner has closed it meanwhile.
    """
    with socket.socket(fileno=os.dup(found.fd)) as copy:
        if copy.getsockname()[:2] != found.local:  # the number is another socket's by now
            raise OSError(f"the socket at {found.local} is closed")
        copy.setblocking(False)
        yield copy


def milliseconds_since_data(connection: socket.socket) -> int:
    """Return how long ago a connection has last received data."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_DATA_RECEIVED + 4)
    return int(struct.unpack_from("=I", info, LAST_DATA_RECEIVED)[0])


def disconnect(connection: socket.socket) -> None:
    """Reset a connection: what has come and was not read is gone, and nothing more comes.

    `shutdown` would leave what has come to be read.

    Raises:
        OSError: the kernel refuses.
    """
    nobody = struct.pack("=H14x", socket.AF_UNSPEC)
    if ctypes.CDLL(None, use_errno=True).connect(connection.fileno(), nobody, len(nobody)) != 0:
        raise OSError(ctypes.get_errno(), "cannot be disconnected")


def retransmit_steadily(connection: socket.socket) -> None:
    """Have a connection whose data are dropped send again every 0.2 s, instead of after ever longer times."""
    connection.setsockopt(socket.IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 1)
