"""Whom rank 0 takes for the ranks of the job when they connect to one of its addresses."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from mpisgd.transport.tcp_store import handshake
from mpisgd.transport.tcp_store.handshake import Endpoint, Reception, greet

SECRET = bytes(range(32))
WAIT_S = 10.0
SHORT_S = 0.3


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.2", 0)) as server:
        yield server


def place(listener: socket.socket) -> Endpoint:
    return Endpoint(*listener.getsockname())


@contextlib.contextmanager
def receiving(listener: socket.socket, ranks: list[int]) -> Iterator[Reception]:
    reception = Reception({place(listener): listener}, SECRET, ranks)
    try:
        yield reception
    finally:
        reception.close()
        for connection in reception.arrived[place(listener)].values():
            connection.close()


def connect(listener: socket.socket) -> socket.socket:
    return socket.create_connection(listener.getsockname(), WAIT_S)


def refused(connection: socket.socket) -> bool:
    """Whether the other end has closed it; what it said before is read."""
    connection.settimeout(WAIT_S)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_ranks_that_know_the_secret_arrive_and_can_talk(listener):
    where = place(listener)
    with receiving(listener, [1, 2]) as reception, connect(listener) as two, connect(listener) as one:
        greet(two, SECRET, 2, where)
        greet(one, SECRET, 1, where)
        while not reception.is_complete(where):
            time.sleep(0.01)
        reception.arrived[where][2].sendall(b"to 2")
        assert two.recv(4) == b"to 2"
        assert sorted(reception.arrived[where]) == [1, 2]


def test_who_does_not_know_the_secret_is_refused_and_says_nothing_of_it(listener):
    with receiving(listener, [1]) as reception, connect(listener) as stranger:
        with pytest.raises(OSError, match=r"closed|reset"):
            greet(stranger, b"x" * 32, 1, place(listener))
        assert reception.arrived[place(listener)] == {}


def test_a_listener_that_does_not_know_the_secret_is_not_taken_for_rank_0():
    """Somebody else's host may have the address."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        impostor = Reception({place(server): server}, b"x" * 32, [1])
        with connect(server) as connection, pytest.raises(OSError, match=r"closed|reset"):
            greet(connection, SECRET, 1, place(server))
        impostor.close()
    with socket.create_server(("127.0.0.2", 0)) as server, connect(server) as connection:
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(bytes(handshake.NONCE_BYTES) + bytes(handshake.PROOF_BYTES))
            with pytest.raises(ConnectionRefusedError, match=r"at 127.0.0.2 does not know the job's secret"):
                greet(connection, SECRET, 1, place(server))


def test_an_answer_of_a_rank_does_not_count_a_second_time(listener):
    """The token was the same for all, and sent in clear: whoever had read it was a rank."""

    class Recorder:
        def __init__(self, inner: socket.socket) -> None:
            self.inner, self.sent = inner, b""

        def recv(self, num_bytes: int) -> bytes:
            return self.inner.recv(num_bytes)

        def sendall(self, data: bytes) -> None:
            self.sent += data
            self.inner.sendall(data)

    with receiving(listener, [1, 2]) as reception, connect(listener) as rank, connect(listener) as stranger:
        recorder = Recorder(rank)
        greet(recorder, SECRET, 1, place(listener))  # type: ignore[arg-type]
        other_rank = struct.pack("!I", 2) + recorder.sent[4:]
        stranger.sendall(recorder.sent)
        assert refused(stranger)
        with connect(listener) as again:
            again.sendall(other_rank)
            assert refused(again)
        assert sorted(reception.arrived[place(listener)]) == [1]


def test_a_rank_arrives_once_and_others_than_those_of_the_job_do_not(listener):
    """Tokens were counted, and not ranks: one that connected twice stood for two."""
    where = place(listener)
    with receiving(listener, [1, 2]) as reception, contextlib.ExitStack() as opened:
        first, second, seventh = (opened.enter_context(connect(listener)) for _ in range(3))
        greet(first, SECRET, 1, where)
        greet(second, SECRET, 1, where)
        greet(seventh, SECRET, 7, where)
        assert refused(second)
        assert refused(seventh)
        assert not reception.is_complete(where)


def test_strangers_that_speak_something_else_or_nothing_keep_nobody_out(listener):
    """More of them than may wait: those that came first and say nothing go."""
    where = place(listener)
    validate = struct.pack("<BI", 0, 0x3C85F7CE)  # how a client of torch's TCPStore begins
    wanted = struct.pack("<BQ", 1, 3) + b"/id" + struct.pack("<Q", 8) + b"stranger"
    with receiving(listener, [1]) as reception, contextlib.ExitStack() as strangers:
        for i in range(handshake.SPARE + 20):
            connection = strangers.enter_context(connect(listener))
            with contextlib.suppress(OSError):
                connection.sendall((b"", validate + wanted * 4, b"GET / HTTP/1.1\r\n\r\n" * 9)[i % 3])
        with connect(listener) as rank:
            greet(rank, SECRET, 1, where)
            deadline = time.monotonic() + WAIT_S
            while not reception.is_complete(where):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert len(reception._newcomers) <= handshake.SPARE + 1


def test_one_that_does_not_come_is_an_error_at_the_limit(listener):
    said = r"rank 3 has not connected to 127.0.0.2 in 0.3 s"
    with receiving(listener, [3]) as reception, pytest.raises(TimeoutError, match=said):
        reception.wait_for(place(listener), 3, SHORT_S)
