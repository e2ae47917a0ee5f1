"""The interface on the way to an address, as this machine's routes have it."""

import psutil
import pytest

from mpisgd.bench.network import interface_to
from mpisgd.transport.tcp_store.rendezvous import local_addresses


def test_the_way_to_an_own_address_is_its_own_interface():
    for address in local_addresses():
        found = interface_to(address)
        assert found.address == address
        assert address in [entry.address for entry in psutil.net_if_addrs()[found.name]]


def test_an_address_is_no_name():
    with pytest.raises(ValueError, match="does not appear"):
        interface_to("host.example")
