"""How ranks ask rank 0's `Table`: rank 0 itself by a call, the others by a connection that is authenticated.

A frame is its length, the number of the question, the operation (0 in an answer) and the fields, each with
its length. Answers may come in another order than the questions: one that waits for a key holds up no other.
"""

import contextlib
import itertools
import selectors
import socket
import struct
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from mpisgd.threads import wait_registry
from mpisgd.transport.tcp_store.table import Operation, Table

__all__ = ["Link", "LocalLink", "RemoteLink", "Server"]

HEADER = struct.Struct("!IQB")  # bytes that follow, number of the question, operation
FIELD = struct.Struct("!I")
RECEIVE_BYTES = 2**16
SEND_TIMEOUT_S = 30.0  # of the server, to a rank that does not read what it has asked for
GONE = "rank 0, which keeps the store, has ended or closed the connection"

Values = Sequence[bytes]


class Link(Protocol):
    """A way to the table."""

    def ask(self, operation: Operation, fields: Values) -> "Future[Values]":
        """Ask; the future gets the fields of the answer, or a ConnectionError."""

    def forget(self, question: "Future[Values]") -> None:
        """Wait for an answer no more."""

    def close(self) -> None:
        """Ask no more."""


def _frame(number: int, operation: int, fields: Values) -> bytes:
    body = b"".join(FIELD.pack(len(field)) + field for field in fields)
    return HEADER.pack(len(body), number, operation) + body


class _Frames:
    """Bytes as they come, taken apart."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[tuple[int, int, list[bytes]]]:
        """Yield the number, operation and fields of each frame that is complete."""
        self._buffer += received
        while len(self._buffer) >= HEADER.size:
            num_bytes, number, operation = HEADER.unpack_from(self._buffer)
            if len(self._buffer) < HEADER.size + num_bytes:
                return
            body = bytes(self._buffer[HEADER.size : HEADER.size + num_bytes])
            del self._buffer[: HEADER.size + num_bytes]
            yield number, operation, _fields(body)


def _fields(body: bytes) -> list[bytes]:
    fields, start = [], 0
    while start < len(body):
        (num_bytes,) = FIELD.unpack_from(body, start)
        start += FIELD.size + num_bytes
        fields.append(body[start - num_bytes : start])
    return fields


@contextlib.contextmanager
def _calls_nobody() -> Iterator[None]:
    """Tell the deadlock detector that this thread begins no operation, whatever it waits for."""
    ident = threading.get_ident()
    wait_registry.workers[ident] = lambda: False
    try:
        yield
    finally:
        wait_registry.workers.pop(ident, None)


class LocalLink:
    """Rank 0's own way to its table.

    Args:
        table: of this process.
        server: that serves the others, closed with this.
    """

    def __init__(self, table: Table, server: "Server") -> None:
        self._table = table
        self._server = server

    def ask(self, operation: Operation, fields: Values) -> "Future[Values]":
        """See `Link`."""
        question: Future[Values] = Future()
        self._table.ask(operation, fields, question.set_result, question)
        return question

    def forget(self, question: "Future[Values]") -> None:
        """See `Link`."""
        self._table.forget(lambda asker: asker is question)

    def close(self) -> None:
        """See `Link`."""
        self._server.close()


class RemoteLink:
    """Another rank's way to the table.

    Args:
        connection: to rank 0, authenticated.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._questions: dict[int, Future[Values]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="mpisgd store answers", daemon=True)
        self._thread.start()

    def ask(self, operation: Operation, fields: Values) -> "Future[Values]":
        """See `Link`."""
        question: Future[Values] = Future()
        with self._lock:
            if self._is_closed:
                question.set_exception(ConnectionError(GONE))
                return question
            number = next(self._numbers)
            self._questions[number] = question
            try:
                self._connection.sendall(_frame(number, operation, fields))
            except OSError:
                del self._questions[number]
                question.set_exception(ConnectionError(GONE))
        return question

    def forget(self, question: "Future[Values]") -> None:
        """See `Link`. The server keeps the question: its answer is dropped when it comes."""
        with self._lock:
            for number in [number for number, asked in self._questions.items() if asked is question]:
                del self._questions[number]

    def close(self) -> None:
        """See `Link`."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        """Hand over the answers as they come, until the connection ends."""
        with _calls_nobody():
            self._receive()
        with self._lock:
            self._is_closed = True
            left, self._questions = [*self._questions.values()], {}
        for question in left:
            question.set_exception(ConnectionError(GONE))

    def _receive(self) -> None:
        frames = _Frames()
        with selectors.DefaultSelector() as selector, self._connection, contextlib.suppress(OSError):
            selector.register(self._connection, selectors.EVENT_READ)
            while selector.select() is not None and (got := self._connection.recv(RECEIVE_BYTES)):
                for number, _, fields in frames.feed(got):
                    with self._lock:
                        question = self._questions.pop(number, None)
                    if question is not None:
                        question.set_result(fields)


class _Client:
    """A rank, as the server sees it."""

    def __init__(self, connection: socket.socket, table: Table) -> None:
        self.connection = connection
        self._table = table
        self._frames = _Frames()
        self._lock = threading.Lock()
        connection.settimeout(SEND_TIMEOUT_S)

    def receive(self) -> bool:
        """Take in what has come; return whether the rank is still there."""
        try:
            got = self.connection.recv(RECEIVE_BYTES)
        except OSError:
            return False
        try:
            for number, operation, fields in self._frames.feed(got):
                self._ask(number, Operation(operation), fields)
        except (ValueError, struct.error) as exc:  # `add` to what is no number, say
            warnings.warn(f"store: a question cannot be answered: {exc}", RuntimeWarning, stacklevel=2)
            return False
        return bool(got)

    def _ask(self, number: int, operation: Operation, fields: Values) -> None:
        def answer(found: Values) -> None:
            with self._lock, contextlib.suppress(OSError):  # it has gone, and is dropped when that is seen
                self.connection.sendall(_frame(number, 0, found))

        self._table.ask(operation, fields, answer, (self, number))

    def has_asked(self, asker: object) -> bool:
        return isinstance(asker, tuple) and asker[0] is self


class Server:
    """Serves a table to other ranks, in a thread of its own.

    Args:
        table: of this process.
        connections: of the others, authenticated, by rank.
    """

    def __init__(self, table: Table, connections: Mapping[int, socket.socket]) -> None:
        self._table = table
        self._clients = [_Client(connection, table) for connection in connections.values()]
        self._thread = threading.Thread(target=self._run, name="mpisgd store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with _calls_nobody(), selectors.DefaultSelector() as selector:
            for client in self._clients:
                selector.register(client.connection, selectors.EVENT_READ, client)
            while selector.get_map():
                for key, _ in selector.select():
                    client = key.data
                    if not client.receive():
                        selector.unregister(client.connection)
                        client.connection.close()
                        self._table.forget(client.has_asked)
