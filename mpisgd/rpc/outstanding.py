"""The calls of this rank that have no answer yet, for reports of what it waits for."""

import itertools
from typing import NamedTuple

__all__ = ["Call", "add_outstanding", "outstanding_calls", "remove_outstanding"]


class Call(NamedTuple):
    """A call of a function on another rank.

    Attributes:
        kind: `rpc_sync`.
        function: its name.
        worker: the name of the worker that runs it.
        rank: the rank of that worker.
    """

    kind: str
    function: str
    worker: str
    rank: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.function} on {self.worker!r}"


_numbers = itertools.count()
_outstanding: dict[int, Call] = {}


def add_outstanding(call: Call) -> int:
    """Note a call; return the number by which it is removed."""
    number = next(_numbers)
    _outstanding[number] = call
    return number


def remove_outstanding(number: int) -> None:
    """Note that a call has its answer."""
    _outstanding.pop(number, None)


def outstanding_calls() -> list[Call]:
    """Return the calls without an answer, the oldest first."""
    return list(_outstanding.copy().values())
