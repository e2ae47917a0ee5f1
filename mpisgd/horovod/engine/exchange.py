"""`exchange`: in every cycle all ranks learn what each has submitted since the last one.

One all-gather of a small fixed message: flags, and a bit for each known request. A second one
follows where a rank has submitted a request that is not in the cache, with these requests, pickled.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.group import Group
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.request_cache import RequestCache

__all__ = ["CycleMessage", "exchange"]

T = TypeVar("T")

JOINED, LEAVING, WANTS_STACKS = 1, 2, 4


class CycleMessage(NamedTuple):
    """What one rank sends in one cycle.

    Attributes:
        requests: submitted since its last cycle.
        joined: whether it has no more data, from now on.
        leaving: whether it will submit nothing any more.
        wants_stacks: whether it asks for everyone's Python stack.
        stack: its own, in a cycle in which a rank asks.
    """

    requests: Sequence[Request]
    joined: bool = False
    leaving: bool = False
    wants_stacks: bool = False
    stack: str = ""


def exchange(
    mine: CycleMessage, cache: RequestCache, group: Group, stack: Callable[[], str]
) -> list[CycleMessage]:
    """Return the messages of all ranks, by rank. Collective over the job.

    Args:
        mine: this rank's.
        cache: the same on all ranks.
        group: all ranks, used for nothing else.
        stack: returns the Python stack of this rank.

    Cost: an all-gather of 16 bytes and a bit per cached request; another where requests are new, and one
        where a rank asks for stacks.
    """
    known = [slot for request in mine.requests if (slot := cache.slot(request)) is not None]
    new = [request for request in mine.requests if cache.slot(request) is None]
    flags = JOINED * mine.joined | LEAVING * mine.leaving | WANTS_STACKS * mine.wants_stacks
    sent = torch.tensor([flags, len(new), *cache.as_words(known)])
    everyone = torch.empty(group.size, len(sent), dtype=torch.int64)
    all_gather_into_tensor(everyone, sent, group)
    everyones_new = _everyones(new, group) if everyone[:, 1].any() else [[]] * group.size
    asked = bool((everyone[:, 0] & WANTS_STACKS).any())
    stacks = _everyones(stack(), group) if asked else [""] * group.size
    return [
        CycleMessage(
            [*map(cache.request, cache.from_words(row[2:])), *everyones_new[rank]],
            bool(row[0] & JOINED),
            bool(row[0] & LEAVING),
            bool(row[0] & WANTS_STACKS),
            stacks[rank],
        )
        for rank, row in enumerate(everyone)
    ]


def _everyones(mine: T, group: Group) -> list[T]:
    gathered: list[Any] = [None] * group.size
    all_gather_object(gathered, mine, group)
    return gathered
