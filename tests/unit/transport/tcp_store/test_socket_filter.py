"""Who may connect to a listening socket."""

from __future__ import annotations

import contextlib
import socket

import pytest

from mpisgd.transport.tcp_store.socket_filter import admit_only


def gets_in(listener: socket.socket, source: str) -> bool:
    """Whether a connection from this address comes about."""
    with socket.socket(listener.family) as connection:
        connection.settimeout(0.3)
        connection.bind((source, 0))
        try:
            connection.connect(listener.getsockname())
        except TimeoutError:
            return False
        return True


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.2", 0)) as server:
        yield server


def test_without_a_filter_everyone_gets_in(listener):
    assert gets_in(listener, "127.0.0.9")


@pytest.mark.parametrize("admitted", [["127.0.0.5"], ["127.0.0.3", "127.0.0.5", "127.0.0.7"]])
def test_only_the_named_get_in(listener, admitted):
    admit_only(listener, admitted)
    assert {name for name in admitted if gets_in(listener, name)} == set(admitted)
    assert not any(gets_in(listener, other) for other in ("127.0.0.9", "127.0.0.2"))


def test_nobody_named_is_nobody_admitted(listener):
    admit_only(listener, [])
    assert not gets_in(listener, "127.0.0.5")


def test_who_was_waiting_is_turned_away(listener):
    with socket.create_connection(listener.getsockname(), source_address=("127.0.0.9", 0)) as stranger:
        admit_only(listener, ["127.0.0.5"])
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    listener.settimeout(0.2)
    with pytest.raises(TimeoutError):
        listener.accept()


def test_a_connection_that_was_let_in_carries_data_both_ways(listener):
    admit_only(listener, ["127.0.0.5"])
    with socket.create_connection(listener.getsockname(), source_address=("127.0.0.5", 0)) as guest:
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"question" * 10_000)
            received = b""
            while len(received) < 80_000:
                received += guest.recv(2**20)
            guest.sendall(b"answer")
            assert (received, accepted.recv(6)) == (b"question" * 10_000, b"answer")


def test_addresses_of_ipv6():
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    with server:
        admit_only(server, ["fe80::1", "fd00::7"])
        assert not gets_in(server, "::1")
        admit_only(server, ["fe80::1", "::1"])
        assert gets_in(server, "::1")


def test_too_many_addresses_are_refused(listener):
    with pytest.raises(OSError, match="too many"):
        admit_only(listener, [f"10.0.{i // 256}.{i % 256}" for i in range(2000)])
