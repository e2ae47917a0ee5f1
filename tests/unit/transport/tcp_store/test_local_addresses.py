"""The addresses of this host at which rank 0 listens, from interfaces that are made up."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil

from mpisgd.transport.tcp_store.rendezvous import local_addresses


def test_ipv4_comes_first_and_what_stays_on_a_link_is_left_out(monkeypatch):
    def entry(family, address):
        return SimpleNamespace(family=family, address=address)

    interfaces = {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "eth0": [
            entry(socket.AF_PACKET, "02:42:ac:11:00:02"),
            entry(socket.AF_INET6, "fe80::1%eth0"),
            entry(socket.AF_INET6, "fd00::2"),
            entry(socket.AF_INET, "192.0.2.2"),
        ],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    assert local_addresses() == ["192.0.2.2", "fd00::2", "127.0.0.1"]
