"""The sockets of this process, as the kernel lists them, and who may connect to those that listen."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from mpisgd.rpc.admission import Admission, listening_endpoints, made_connections
from mpisgd.rpc.tcp_sockets import (
    Endpoint,
    duplicate,
    list_tcp_sockets,
    milliseconds_since_data,
    source_address,
)

FAMILIES = {"127.0.0.2": socket.AF_INET, "::1": socket.AF_INET6}


@pytest.fixture(params=FAMILIES)
def listener(request):
    try:
        server = socket.create_server((request.param, 0), family=FAMILIES[request.param])
    except OSError as exc:
        pytest.skip(f"no such address here: {exc}")
    with server:
        server.settimeout(5)
        yield server


def endpoint(listener: socket.socket) -> Endpoint:
    return Endpoint(*listener.getsockname()[:2])


@contextlib.contextmanager
def connected(listener: socket.socket):
    """Both ends of a connection."""
    with socket.create_connection(listener.getsockname()[:2], 5) as near, listener.accept()[0] as far:
        yield near, far


def gets_in(listener: socket.socket) -> bool:
    with socket.socket(listener.family) as connection:
        connection.settimeout(0.3)
        try:
            connection.connect(listener.getsockname())
        except TimeoutError:
            return False
        return True


def test_a_socket_that_listens_is_listed_until_it_is_closed(listener):
    where = endpoint(listener)
    assert where in listening_endpoints()
    listener.close()
    assert where not in listening_endpoints()


def test_both_ends_of_a_connection_are_listed(listener):
    with connected(listener) as (near, _):
        ours = Endpoint(*near.getsockname()[:2])
        found = {(one.local, one.remote) for one in list_tcp_sockets()}
        assert {(ours, endpoint(listener)), (endpoint(listener), ours)} <= found
        assert made_connections({endpoint(listener)}, set()) == {ours}
        assert [one.remote for one in Admission([endpoint(listener)]).accepted()] == [ours]


def test_time_since_data_starts_anew_with_each_byte(listener):
    with connected(listener) as (near, far):
        admission = Admission([endpoint(listener)])
        near.sendall(b"x")
        time.sleep(0.3)
        assert milliseconds_since_data(far) >= 250
        assert 0.25 <= admission.seconds_since_data() < 5
        near.sendall(b"x")
        assert milliseconds_since_data(far) < 250


def test_without_a_connection_nobody_has_called():
    assert Admission([]).seconds_since_data() == float("inf")


def test_who_is_not_admitted_does_not_get_in(listener):
    admission = Admission([endpoint(listener)])
    assert gets_in(listener)
    admission.admit([])
    assert not gets_in(listener)
    admission.admit([source_address(listener.getsockname()[0])])
    assert gets_in(listener)


def test_the_owner_of_a_socket_still_blocks_or_not_as_it_chose(listener):
    """An agent's loop would stop for ever in a socket that began to block."""
    listener.setblocking(False)
    Admission([endpoint(listener)]).admit([])
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_connection_outlives_a_filter_that_admits_nobody(listener):
    with connected(listener) as (near, far):
        Admission([endpoint(listener)]).shut()
        near.sendall(b"question")
        assert far.recv(8) == b"question"


def test_strangers_are_closed_and_the_others_are_not(listener):
    with connected(listener) as (near, far), connected(listener) as (stranger, _):
        known = {Endpoint(*near.getsockname()[:2])}
        assert Admission([endpoint(listener)]).reset_strangers(known) == 1
        with pytest.raises(ConnectionResetError):
            stranger.recv(1)
        far.sendall(b"still here")
        assert near.recv(10) == b"still here"


def test_a_descriptor_that_is_another_sockets_by_now_is_refused(listener):
    with connected(listener) as (near, far):
        listed = {one.fd: one for one in list_tcp_sockets()}
        stale = listed[near.fileno()]._replace(fd=far.fileno())
        with pytest.raises(OSError, match="closed"), duplicate(stale):
            pass


def test_the_way_to_loopback_is_loopback():
    assert source_address("127.0.0.1") == "127.0.0.1"
