"""Whom rank 0 takes for the ranks of the job when they connect to one of its addresses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from mpisgd.transport.tcp_store import rendezvous

TOKEN = b"t" * rendezvous.TOKEN_BYTES


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.2", 0)) as server:
        yield server


@contextlib.contextmanager
def connected(listener: socket.socket, source: str, sends: bytes) -> Iterator[None]:
    with socket.socket() as connection:
        connection.bind((source, 0))
        connection.connect(listener.getsockname())
        connection.sendall(sends)
        yield


def test_a_stranger_who_stays_silent_does_not_spoil_an_address(listener):
    with connected(listener, "127.0.0.9", b""), connected(listener, "127.0.0.5", TOKEN):
        assert rendezvous._accept_ranks(listener, TOKEN, 1) == {"127.0.0.5"}


def test_a_stranger_who_says_something_else_is_not_counted(listener):
    with (
        connected(listener, "127.0.0.9", b"GET / HTTP/1.1"),
        connected(listener, "127.0.0.5", TOKEN),
        connected(listener, "127.0.0.6", TOKEN),
    ):
        assert rendezvous._accept_ranks(listener, TOKEN, 2) == {"127.0.0.5", "127.0.0.6"}


def test_an_address_that_too_few_have_reached_is_not_taken(listener, monkeypatch):
    monkeypatch.setattr(rendezvous, "CONNECT_TIMEOUT_S", 0.1)
    with connected(listener, "127.0.0.5", TOKEN):
        assert rendezvous._accept_ranks(listener, TOKEN, 2) is None
