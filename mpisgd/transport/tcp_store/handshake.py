"""Mutual proof of two ends of a connection that they know a secret, which MPI has brought and nobody sends.

    who listens  -> nonce
    who connects -> its rank, a nonce, proof that it knows the secret
    who listens  -> proof that it knows the secret

A proof is an HMAC over the side, the rank, the place of the listener and both nonces: it fits this connection
alone, and says nothing of the secret to whoever reads it.
"""

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

__all__ = ["SECRET_BYTES", "Endpoint", "Reception", "greet"]

SECRET_BYTES = 32
NONCE_BYTES = 16
DIGEST = "sha256"
PROOF_BYTES = 32
RANK = struct.Struct("!I")
ANSWER_BYTES = RANK.size + NONCE_BYTES + PROOF_BYTES
SPARE = 64  # connections that may be open beside one for each rank without having proved anything
POLL_S = 0.05


class Endpoint(NamedTuple):
    """Where to connect to."""

    address: str
    port: int


def _proof(secret: bytes, side: bytes, rank: int, where: Endpoint, nonces: bytes) -> bytes:
    """Return the proof of one side; `nonces`: the listener's, then the other's."""
    place = f"{where.address} {where.port}".encode()
    return hmac.digest(secret, b"|".join([side, RANK.pack(rank), place, nonces]), DIGEST)


def greet(connection: socket.socket, secret: bytes, rank: int, where: Endpoint) -> None:
    """Take the part of who connects; the connection has a timeout.

    Raises:
        OSError: the other end does not know the secret, or does not answer in time.
    """
    theirs, mine = _receive(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    nonces = theirs + mine
    connection.sendall(RANK.pack(rank) + mine + _proof(secret, b"connects", rank, where, nonces))
    if not hmac.compare_digest(
        _receive(connection, PROOF_BYTES), _proof(secret, b"listens", rank, where, nonces)
    ):
        raise ConnectionRefusedError(f"who listens at {where.address} does not know the job's secret")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        got = connection.recv(num_bytes - len(found))
        if not got:
            raise ConnectionResetError("the other end has closed")
        found += got
    return found


class _Newcomer:
    """A connection that has not proved anything yet.

    Args:
        connection: as accepted.
        where: the listener's place.
        secret: of the job.
    """

    def __init__(self, connection: socket.socket, where: Endpoint, secret: bytes) -> None:
        self.connection = connection
        self.where = where
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._answer = b""
        connection.setblocking(False)
        connection.send(self._nonce)

    def read(self) -> int | None:
        """Take in what has come; return the rank that has proved itself, None where there is more to come.

        Raises:
            OSError: it is a stranger.
        """
        got = self.connection.recv(ANSWER_BYTES - len(self._answer))
        if not got:
            raise ConnectionResetError("closed")
        self._answer += got
        if len(self._answer) < ANSWER_BYTES:
            return None
        (rank,) = RANK.unpack_from(self._answer)
        nonces = self._nonce + self._answer[RANK.size : RANK.size + NONCE_BYTES]
        expected = _proof(self._secret, b"connects", rank, self.where, nonces)
        if not hmac.compare_digest(self._answer[-PROOF_BYTES:], expected):
            raise ConnectionRefusedError("a stranger")
        self.connection.send(_proof(self._secret, b"listens", rank, self.where, nonces))
        return int(rank)


class Reception:
    """Accepts the connections of ranks at some listeners, and nobody else's, in a thread of its own.

    Args:
        listeners: by their place.
        secret: that the ranks know.
        ranks: whose connections are wanted, one of each rank at each listener.

    Attributes:
        arrived: the connections of ranks, by place and rank.
    """

    def __init__(
        self, listeners: Mapping[Endpoint, socket.socket], secret: bytes, ranks: Collection[int]
    ) -> None:
        self._listeners = dict(listeners)
        self._secret = secret
        self._ranks = frozenset(ranks)
        self.arrived: dict[Endpoint, dict[int, socket.socket]] = {where: {} for where in listeners}
        self._newcomers: list[_Newcomer] = []  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpisgd reception", daemon=True)
        self._thread.start()

    def is_complete(self, where: Endpoint) -> bool:
        """Return whether all ranks have come to a place."""
        return self._ranks <= self.arrived[where].keys()

    def wait_for(self, where: Endpoint, rank: int, timeout_s: float) -> socket.socket:
        """Return the connection of a rank to a place.

        Raises:
            TimeoutError: it does not come in time.
        """
        deadline = time.monotonic() + timeout_s
        while rank not in self.arrived[where]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} has not connected to {where.address} in {timeout_s:g} s")
            time.sleep(POLL_S / 10)
        return self.arrived[where][rank]

    def close(self) -> None:
        """Accept nobody any more. The connections that have arrived, and the listeners, stay."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with self._selector:
            for where, listener in self._listeners.items():
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ, where)
            while not self._is_over.is_set():
                for key, _ in self._selector.select(POLL_S):
                    if isinstance(key.data, _Newcomer):
                        self._read_from(key.data)
                    else:
                        self._accept(self._listeners[key.data], key.data)
            for newcomer in [*self._newcomers]:
                self._drop(newcomer)

    def _accept(self, listener: socket.socket, where: Endpoint) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            try:
                newcomer = _Newcomer(connection, where, self._secret)
            except OSError:
                connection.close()
                return
            if len(self._newcomers) >= SPARE + len(self._ranks):
                self._drop(self._newcomers[0])  # who knows the secret answers at once
            self._newcomers.append(newcomer)
            self._selector.register(connection, selectors.EVENT_READ, newcomer)

    def _read_from(self, newcomer: _Newcomer) -> None:
        if newcomer not in self._newcomers:  # dropped for another one meanwhile
            return
        arrived = self.arrived[newcomer.where]
        try:
            rank = newcomer.read()
        except BlockingIOError:
            return
        except OSError:
            self._drop(newcomer)
            return
        if rank in self._ranks and rank not in arrived:
            self._selector.unregister(newcomer.connection)
            self._newcomers.remove(newcomer)
            newcomer.connection.setblocking(True)
            arrived[rank] = newcomer.connection
        elif rank is not None:
            self._drop(newcomer)

    def _drop(self, newcomer: _Newcomer) -> None:
        self._newcomers.remove(newcomer)
        with contextlib.suppress(KeyError):
            self._selector.unregister(newcomer.connection)
        newcomer.connection.close()
