"""`exchange`: in every cycle all ranks learn what each has submitted since the last one.

One all-gather of a small fixed message: how many requests are new, and a bit for each that was seen before.
A second one follows where a rank has submitted a new request, with these requests, pickled.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.group import Group
from mpisgd.horovod.engine.request import Request

__all__ = ["RequestCache", "exchange"]


class RequestCache:
    """The requests seen last, numbered.

    All ranks put the same requests in at the same time, so a number means the same to all of them.

    Args:
        capacity: how many; 0: none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_words = -(-capacity // 64)  # of 64 bits, that a bit for each request takes
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
        slot = self._slots.pop(request, len(self._slots))
        if slot == self.capacity:
            slot = self._slots.pop(next(iter(self._slots)))
        self._slots[request] = slot
        self._requests[slot] = request

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


def exchange(mine: Sequence[Request], cache: RequestCache, group: Group) -> list[list[Request]]:
    """Gather the requests that each rank has submitted, by rank. Collective over the job.

    Args:
        mine: what this rank has submitted since the last cycle.
        cache: the same on all ranks.
        group: all ranks, used for nothing else.

    Cost: an all-gather of 8 bytes and a bit per cached request; another where requests are new.
    """
    known = [slot for request in mine if (slot := cache.slot(request)) is not None]
    new = [request for request in mine if cache.slot(request) is None]
    sent = torch.tensor([len(new), *cache.as_words(known)])
    everyone = torch.empty(group.size, len(sent), dtype=torch.int64)
    all_gather_into_tensor(everyone, sent, group)
    everyones_new: list[list[Request]] = [[]] * group.size
    if everyone[:, 0].any():
        all_gather_object(everyones_new, new, group)
    return [
        [*map(cache.request, cache.from_words(row[1:])), *news]
        for row, news in zip(everyone, everyones_new, strict=True)
    ]
