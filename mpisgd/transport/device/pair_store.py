"""`PairStore`: the key-value store by which torch connects the two ends of a channel, by messages of MPI.

It can be had at any time by two ranks alone: nobody else need come, and nothing is opened for it.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta

from mpisgd.transport.tcp_store.network_store import NetworkStore
from mpisgd.transport.tcp_store.table import Operation, Table

__all__ = ["PairStore"]

Values = Sequence[bytes]


class PairStore:
    """One end of it, as the `Link` of torch's store to the table.

    Args:
        has_table: whether this end keeps the table; the other one asks it until they are connected.
        tell: sends to the other end what its `handle` is to be called with. Called from any thread.
        timeout_s: how long torch waits for a key.

    Attributes:
        store: for torch.
    """

    def __init__(self, *, has_table: bool, tell: Callable[..., None], timeout_s: float) -> None:
        self._table = Table() if has_table else None
        self._tell = tell
        self._numbers = itertools.count()
        self._questions: dict[int, Future[Values]] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self.store = NetworkStore(self, "")
        self.store.set_timeout(timedelta(seconds=timeout_s))

    def ask(self, operation: Operation, fields: Values) -> "Future[Values]":
        """See `Link`."""
        question: Future[Values] = Future()
        with self._lock:
            number, table, is_closed = next(self._numbers), self._table, self._is_closed
            self._questions[number] = question
        if is_closed:
            self._answer(number, ConnectionError("the other end of the messages was not connected"))
        elif table is not None:
            table.ask(operation, fields, lambda values: self._answer(number, values), number)
        else:
            self._tell(number, operation, fields)
        return question

    def handle(self, number: int, operation: Operation | None, fields: Values) -> None:
        """Take what the other end asks, or answers (no operation)."""
        if operation is None:
            self._answer(number, fields)
        elif self._table is not None:
            self._table.ask(
                operation, fields, lambda values: self._tell(number, None, values), ("asked", number)
            )

    def _answer(self, number: int, values: Values | ConnectionError) -> None:
        with self._lock:
            question = self._questions.pop(number, None)
        if question is None:
            return
        if isinstance(values, ConnectionError):
            question.set_exception(values)
        else:
            question.set_result(values)

    def forget(self, question: "Future[Values]") -> None:
        """See `Link`."""
        with self._lock:
            for number in [number for number, asked in self._questions.items() if asked is question]:
                del self._questions[number]

    def connected(self) -> None:
        """Ask the other end no more: what torch's threads look for later is not there, at once."""
        with self._lock:
            self._table = self._table or Table()

    def close(self) -> None:
        """End the waits. See `Link`."""
        with self._lock:
            self._is_closed, left = True, list(self._questions)
        for number in left:
            self._answer(number, ConnectionError("the other end of the messages was not connected"))
