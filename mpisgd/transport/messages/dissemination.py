"""Dissemination: everyone learns the extremes of a number in ceil(log2(size)) rounds of one small message.

In round k, rank r sends what it has to rank r + 2**k and receives from rank r - 2**k.

Source: Hensgen, Finkel and Manber 1988, "Two algorithms for barrier synchronization".
"""

import struct
from collections.abc import Iterator, Sequence

from mpisgd.interfaces.communicator import GroupCommunicator

__all__ = ["Dissemination"]

# Tags of the queue's communicator: the rounds take the first few, algorithms start at 64.
FIRST_TAG = 0
PAIR = struct.Struct("<QQ")


class Dissemination:
    """The exchange by messages, between any ranks. Cost: ceil(log2(size)) messages of 16 bytes per rank.

    Args:
        communicator: carries the messages.
        ranks: those of its ranks that take part, this one among them; None: all.
        tag: of the first round; as many follow as there are rounds.
    """

    def __init__(
        self, communicator: GroupCommunicator, ranks: Sequence[int] | None = None, *, tag: int = FIRST_TAG
    ) -> None:
        ranks = range(communicator.size) if ranks is None else ranks
        self._communicator = communicator
        self._rounds = [_Round(communicator, ranks, k, tag) for k in range((len(ranks) - 1).bit_length())]
        self._ahead: Iterator[_Round] = iter(())
        self._round: _Round | None = None
        self._low = self._high = 0

    def start(self, low: int, high: int) -> None:
        """Begin with the extremes that this rank knows."""
        self._low, self._high = low, high
        self._ahead = iter(self._rounds)
        self._next_round()

    def _next_round(self) -> None:
        self._round = next(self._ahead, None)
        if self._round is not None:
            self._round.start(self._low, self._high)

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        while self._round is not None and self._round.done():
            low, high = self._round.received()
            self._low, self._high = min(self._low, low), max(self._high, high)
            self._next_round()
        return self._round is None

    def finish(self, high: int) -> None:
        """Wait for nobody any more: send what is left, so that others receive `high`; read nothing."""
        for each in self._ahead:
            each.start(self._low, max(self._high, high))

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest."""
        return self._low, self._high

    def close(self) -> None:
        """Free what MPI keeps for it, whether it is over or not."""
        for each in self._rounds:
            each.close(over=self._round is None)

    def missing(self) -> str:
        """Describe the ranks that this rank waits for."""
        assert self._round is not None
        src = self._communicator.global_ranks[self._round.src]
        return f"rank {src}, which has not come or waits for another rank itself"


class _Round:
    """One round, prepared once."""

    def __init__(self, communicator: GroupCommunicator, ranks: Sequence[int], k: int, tag: int) -> None:
        me, distance = ranks.index(communicator.rank), 1 << k
        self.src = ranks[(me - distance) % len(ranks)]
        self._mine = bytearray(PAIR.size)
        self._theirs = bytearray(PAIR.size)
        self._communicator = communicator
        dst = ranks[(me + distance) % len(ranks)]
        self._requests = communicator.persistent(self._mine, dst, self._theirs, self.src, tag + k)

    def start(self, low: int, high: int) -> None:
        PAIR.pack_into(self._mine, 0, low, high)
        self._communicator.start(self._requests)

    def done(self) -> bool:
        return self._communicator.poll(self._requests)

    def close(self, *, over: bool) -> None:
        if over:
            self._communicator.release(self._requests)
        else:  # a late message still arrives here
            self._communicator.abandon(self._requests, [self._mine, self._theirs])

    def received(self) -> tuple[int, int]:
        return PAIR.unpack(self._theirs)
