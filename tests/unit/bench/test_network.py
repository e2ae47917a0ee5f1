"""The interface on the way to an address, as this machine's routes have it."""

import socket

import psutil
import pytest

from mpisgd.tools.bench.network import _pass_on, interface_to
from mpisgd.transport.tcp_store.rendezvous import local_addresses


def test_the_way_to_an_own_address_is_its_own_interface():
    for address in local_addresses():
        found = interface_to(address)
        assert found.address == address
        assert address in [entry.address for entry in psutil.net_if_addrs()[found.name]]


def test_an_address_is_no_name():
    with pytest.raises(ValueError, match="does not appear"):
        interface_to("host.example")


def test_a_host_that_goes_away_ends_the_ring_with_an_error():
    """The loop went round for ever: what a closed connection has to say is nothing."""
    after, next_host = socket.socketpair()
    before, last_host = socket.socketpair()
    with after, next_host, before:
        last_host.sendall(b"half")
        last_host.close()
        with pytest.raises(ConnectionResetError, match="before this one in the ring has closed"):
            _pass_on(after, before, memoryview(b"x" * 8), memoryview(bytearray(8)))
