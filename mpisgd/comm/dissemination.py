"""Dissemination: everyone learns the extremes of a number in ceil(log2(size)) rounds of one small message.

In round k, rank r tells rank r + 2**k what it knows and hears from rank r - 2**k.

Source: Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization".
"""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpisgd.comm.mpi import Wire

__all__ = ["Dissemination"]

# Tags of the lane's communicator: the rounds take the first few, algorithms start at 64.
FIRST_TAG = 0
PAIR = struct.Struct("<QQ")


class Dissemination:
    """The spread over messages, between any ranks. Cost: ceil(log2(size)) messages of 16 bytes per rank."""

    def __init__(self, wire: "Wire") -> None:
        self._rounds = [_Round(wire, k) for k in range((wire.size - 1).bit_length())]
        self._ahead: Iterator[_Round] = iter(())
        self._round: _Round | None = None
        self._low = self._high = 0

    def start(self, digest: int) -> None:
        """Begin with this rank's digest."""
        self._low = self._high = digest
        self._ahead = iter(self._rounds)
        self._next_round()

    def _next_round(self) -> None:
        self._round = next(self._ahead, None)
        if self._round is not None:
            self._round.start(self._low, self._high)

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        while self._round is not None and self._round.done():
            low, high = self._round.heard()
            self._low, self._high = min(self._low, low), max(self._high, high)
            self._next_round()
        return self._round is None

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest."""
        return self._low, self._high

    def missing(self) -> str:
        """Say for whom this rank waits."""
        assert self._round is not None
        return f"rank {self._round.src}, which has not come or waits for another rank itself"


class _Round:
    """One round, prepared once."""

    def __init__(self, wire: "Wire", k: int) -> None:
        distance = 1 << k
        self.src = (wire.rank - distance) % wire.size
        self._mine = bytearray(PAIR.size)
        self._theirs = bytearray(PAIR.size)
        self._wire = wire
        dst = (wire.rank + distance) % wire.size
        self._requests = wire.persistent(self._mine, dst, self._theirs, self.src, FIRST_TAG + k)

    def start(self, low: int, high: int) -> None:
        PAIR.pack_into(self._mine, 0, low, high)
        self._wire.start(self._requests)

    def done(self) -> bool:
        return self._wire.poll(self._requests)

    def heard(self) -> tuple[int, int]:
        return PAIR.unpack(self._theirs)
