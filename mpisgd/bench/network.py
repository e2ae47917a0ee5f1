"""Where the processes of another framework meet: a network that every host of the job is on."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Interface", "Meeting", "interfaces", "meeting_place"]

# Linux's ioctl numbers; each fills a struct ifreq: 16 bytes of name, then a socket address.
SIOCGIFADDR = 0x8915
SIOCGIFNETMASK = 0x891B


@dataclass(frozen=True)
class Interface:
    """A network interface of this host, with an IPv4 address and its network (10.0.0.0/24)."""

    name: str
    address: str
    network: str


@dataclass(frozen=True)
class Meeting:
    """What a process must know to find the others.

    Attributes:
        rank: of the job, as all of these.
        size: number of processes.
        local_rank: place among those of this host.
        local_size: how many of them there are.
        node_rank: this host.
        num_nodes: number of hosts.
        address: of rank 0.
        port: where rank 0 listens.
        interface: to use on this host.
        timeout_s: how long to wait for the others.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    address: str
    port: int
    interface: str
    timeout_s: float


def interfaces() -> list[Interface]:
    """Return this host's interfaces that have an IPv4 address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                address, mask = (_ask(sock, name, what) for what in (SIOCGIFADDR, SIOCGIFNETMASK))
            except OSError:  # it has none
                continue
            network = ipaddress.IPv4Network(f"{address}/{mask}", strict=False)
            found.append(Interface(name, address, str(network)))
    return found


def _ask(sock: socket.socket, name: str, what: int) -> str:
    reply = fcntl.ioctl(sock.fileno(), what, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(reply[20:24])


def meeting_place(everyones: Sequence[Sequence[Interface]], num_nodes: int) -> list[Interface] | None:
    """Return for every rank its interface on a network that all have, None if there is none.

    Args:
        everyones: the interfaces of each rank.
        num_nodes: several hosts cannot meet on their loopback interfaces; one host does best there.
    """

    def suits(candidate: Interface) -> bool:
        is_local = ipaddress.ip_address(candidate.address).is_loopback
        return is_local == (num_nodes == 1)

    for candidate in filter(suits, everyones[0]):
        chosen = [[i for i in mine if i.network == candidate.network] for mine in everyones]
        if all(chosen):
            return [mine[0] for mine in chosen]
    return None
