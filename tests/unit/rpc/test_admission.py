"""Whose bytes reach who serves a listening socket, before, while and after the ranks connect."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from mpisgd.errors import Unreachable
from mpisgd.rpc import admission
from mpisgd.rpc.admission import Admission, made_connections
from mpisgd.rpc.tcp_sockets import Endpoint

SHORT_S = 0.2
WAIT_S = 10.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def place(listener: socket.socket) -> Endpoint:
    return Endpoint(*listener.getsockname())


@contextlib.contextmanager
def connected(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection, the one that connects first."""
    with socket.create_connection(listener.getsockname(), WAIT_S) as outside:
        inside, _ = listener.accept()
        with inside:
            yield outside, inside


def heard(inside: socket.socket, limit_s: float = SHORT_S) -> bytes | None:
    """What comes, None where nothing does."""
    inside.settimeout(limit_s)
    try:
        return inside.recv(100)
    except (TimeoutError, OSError):
        return None


def test_what_a_stranger_has_sent_is_gone_when_it_is_reset(listener):
    """Also of one that has closed: `shutdown` left its call to be read, and it was not even looked for."""
    doorkeeper = Admission([place(listener)])
    with connected(listener) as (outside, inside), connected(listener) as (gone, inside_of_gone):
        for end in (outside, gone):
            end.sendall(b"call")
        gone.close()
        doorkeeper.shut()
        assert doorkeeper.reset_strangers(frozenset()) == 2
        assert not heard(inside)
        assert not heard(inside_of_gone)


def test_one_that_waits_to_be_accepted_is_reset_too(listener):
    doorkeeper = Admission([place(listener)])
    with socket.create_connection(listener.getsockname(), WAIT_S) as outside:
        outside.sendall(b"call")
        doorkeeper.shut()
        doorkeeper.reset_strangers(frozenset())
        listener.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            listener.accept()


def test_who_connects_is_heard_only_once_a_rank_has_told_of_it(listener):
    doorkeeper = Admission([place(listener)])
    doorkeeper.admit(["127.0.0.1"])
    with connected(listener) as (rank, inside), connected(listener) as (stranger, inside_of_stranger):
        for end in (rank, stranger):
            end.sendall(b"call")
        assert heard(inside) is None
        made = made_connections({place(listener)}, set())
        assert made == {Endpoint(*end.getsockname()) for end in (rank, stranger)}
        assert made_connections({place(listener)}, made) == set()
        known = {Endpoint(*rank.getsockname())}
        doorkeeper.let_through(known)
        assert heard(inside, WAIT_S) == b"call"  # sent again by TCP
        doorkeeper.shut()
        assert doorkeeper.reset_strangers(known) == 1
        assert heard(inside_of_stranger) is None
        rank.sendall(b"more")
        assert heard(inside, WAIT_S) == b"more"
        with pytest.raises(TimeoutError):
            socket.create_connection(listener.getsockname(), SHORT_S)


def test_rpc_does_not_start_where_nobody_can_be_shut_out(listener, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise OSError("no filters here")

    monkeypatch.setattr(admission, "admit_only", fails)
    with pytest.raises(Unreachable, match=r"cannot shut out others.*no filters here"):
        Admission([place(listener)]).shut()
