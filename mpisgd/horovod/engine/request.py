"""`Request`: what a rank says of an operation before it runs, and what must be alike on all ranks.

`exchange`: in every cycle all ranks learn what each has submitted since the last one. One all-gather of a
small fixed message: how many requests are new, and a bit for each that was seen before. A second one follows
where a rank has submitted a new request, with these requests, pickled.
"""

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpisgd.arguments import ranks_text
from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.group import Group

__all__ = ["Request", "RequestCache", "differences", "exchange"]


class Request(NamedTuple):
    """One operation, on one tensor or on several that travel together.

    Attributes:
        name: unique among what is pending in a process set; begins with the kind.
        kind: `allreduce`, `allgather`, `broadcast`, `alltoall`, `reducescatter`, `barrier`.
        set_id: the process set.
        op: the reduction, or "".
        dtypes: of the tensors.
        shapes: of the tensors; without the first dimension where ranks may differ in it.
        root: global rank, or -1.
        prescale: multiplied before a reduction.
        postscale: multiplied after it.
        device: type of the device the tensors are on.
        ranks: of a process set that is made or given back.
        about: anything else that must be alike, in lines, of which those that differ are told.
    """

    name: str
    kind: str
    set_id: int = 0
    op: str = ""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    ranks: tuple[int, ...] = ()
    about: str = ""

    @property
    def key(self) -> tuple[int, str]:
        """What it is found by."""
        return self.set_id, self.name

    @property
    def label(self) -> str:
        """The name as the program gave it."""
        return self.name.removeprefix(f"{self.kind}.")

    def __str__(self) -> str:
        """Return the call as messages name it: `allreduce 'x'`, or `join`."""
        return self.kind if self.name == self.kind else f"{self.kind} {self.label!r}"

    @property
    def nbytes(self) -> int:
        """How many bytes the tensors have, or, where ranks may differ, a row of each."""
        itemsizes = [getattr(torch, dtype).itemsize for dtype in self.dtypes]
        return sum(map(operator.mul, itemsizes, map(math.prod, self.shapes)))


# Field by field, in the order in which a difference is worth telling; the words for it.
_TOLD = {
    "kind": "operation",
    "dtypes": "dtype",
    "shapes": "shape",
    "op": "reduction",
    "root": "root rank",
    "prescale": "prescale factor",
    "postscale": "postscale factor",
    "device": "device",
    "ranks": "ranks",
}


def differences(requests: Mapping[int, Request]) -> str | None:
    """Say in what the ranks' requests of one name differ, with ranks and values; None where they agree.

    Args:
        requests: by global rank.
    """
    if len(set(requests.values())) == 1:
        return None
    first = next(iter(requests.values()))
    if (cause := _difference_in_about(requests)) is not None:
        return f"tensor {first.label!r}: {cause}"
    found = [
        _difference(word, {rank: _shown(getattr(request, field)) for rank, request in requests.items()})
        for field, word in _TOLD.items()
    ]
    return f"tensor {first.label!r}: " + "; ".join(filter(None, found))


def _difference_in_about(requests: Mapping[int, Request]) -> str | None:
    """Say what is in the first line in which the ranks differ; what else differs follows from that."""
    listed = {rank: request.about.splitlines() for rank, request in requests.items()}
    for lines in itertools.zip_longest(*listed.values(), fillvalue="nothing"):
        if len(set(lines)) > 1:
            return _difference("parameter", dict(zip(listed, lines, strict=True)))
    return None


def _difference(word: str, values: Mapping[int, str]) -> str | None:
    by_value: dict[str, list[int]] = defaultdict(list)
    for rank, value in sorted(values.items()):
        by_value[value].append(rank)
    if len(by_value) == 1:
        return None
    told = ", ".join(f"{ranks_text(ranks)} gave {value}" for value, ranks in by_value.items())
    return f"mismatched {word}: {told}"


def _shown(value: object) -> str:
    """Return a value as text: a single tensor's shape without the tuple around it."""
    if not isinstance(value, tuple):
        return str(value)
    if value and isinstance(value[0], int):
        return str(list(value))
    return ", ".join(str(list(item) if isinstance(item, tuple) else item) for item in value)


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
