"""`RequestCache`: requests that were seen before are sent as a bit each.

All ranks put the same requests in at the same time, so a number means the same to all of them.
"""

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from mpisgd.horovod.engine.request import Request

__all__ = ["RequestCache"]


class RequestCache:
    """The requests seen last, numbered.

    Args:
        capacity: how many; 0: none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: dict[Request, int] = {}  # the one not used for longest comes first
        self._requests: dict[int, Request] = {}

    def slot(self, request: Request) -> int | None:
        """Return the number of a request, None if it is not known."""
        return self._slots.get(request)

    def request(self, slot: int) -> Request:
        """Return the request of a number."""
        return self._requests[slot]

    def use(self, request: Request) -> None:
        """Remember a request that has run, instead of the one not used for longest if need be."""
        if not self.capacity:
            return
        slot = self._slots.pop(request, None)
        if slot is None:
            slot = self._free_slot()
        self._slots[request] = slot
        self._requests[slot] = request

    def _free_slot(self) -> int:
        if len(self._slots) < self.capacity:
            return len(self._slots)
        return self._slots.pop(next(iter(self._slots)))

    @property
    def num_words(self) -> int:
        """How many 64-bit words a bit for each request takes."""
        return -(-self.capacity // 64)

    def as_words(self, slots: Iterable[int]) -> list[int]:
        """Return the words that hold a bit for each of `slots`, as signed integers."""
        bits = np.zeros(64 * self.num_words, dtype=bool)
        bits[list(slots)] = True
        words: list[int] = np.packbits(bits, bitorder="little").view(np.int64).tolist()
        return words

    def from_words(self, words: Tensor) -> list[int]:
        """Return the slots whose bits are set in `words` [num_words] of int64."""
        bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little")
        slots: list[int] = np.flatnonzero(bits).tolist()
        return slots
