"""On which network interface RPC listens: loopback on one host, else the one towards rank 0.

TensorPipe by itself listens on whatever address the host's name stands for. It takes the name of an interface
from TP_SOCKET_IFNAME, the first time that it listens in a process.
"""

import contextlib
import os
import socket
from collections.abc import Iterator

import psutil
from torch._C._distributed_c10d import Store

from mpisgd.errors import Unreachable
from mpisgd.transport.tcp_store.network_store import NetworkStore

__all__ = ["VARIABLE", "choose_interface", "preferred_interface", "source_address"]

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
