"""`Exchange`: what all ranks have submitted since the last cycle, told to all.

One all-gather of a small fixed message: flags, and a bit for each known request. Only where a rank has
submitted something new does a second one follow, with the requests themselves.
"""

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.collectives.all_gather_ragged import all_gather_ragged
from mpisgd.core.group import Group
from mpisgd.horovod.engine.cache import Cache
from mpisgd.horovod.engine.request import Request

__all__ = ["News", "exchange"]

JOINED, LEAVING, ASKS = 1, 2, 4


class News(NamedTuple):
    """What one rank tells in one cycle.

    Attributes:
        requests: submitted since its last cycle.
        joined: whether it has no more data, from now on.
        leaving: whether it will submit nothing any more.
        asks: whether it wants to know what everyone is doing.
        stack: what it is doing, in a cycle in which somebody asks.
    """

    requests: Sequence[Request]
    joined: bool = False
    leaving: bool = False
    asks: bool = False
    stack: str = ""


def exchange(mine: News, cache: Cache, group: Group, stack: Callable[[], str]) -> list[News]:
    """Return the news of all ranks, by rank. Collective over the job.

    Args:
        mine: this rank's.
        cache: the same on all ranks.
        group: all ranks, used for nothing else.
        stack: tells what this rank is doing.

    Cost: an all-gather of 16 bytes and a bit per cached request; another where requests are new, and one
        where somebody asks for stacks.
    """
    known = [slot for request in mine.requests if (slot := cache.slot(request)) is not None]
    new = [request for request in mine.requests if cache.slot(request) is None]
    packed = pickle.dumps([tuple(request) for request in new]) if new else b""
    flags = JOINED * mine.joined | LEAVING * mine.leaving | ASKS * mine.asks
    told = torch.tensor([flags, len(packed), *cache.as_words(known)])
    everyone = torch.empty(group.size, len(told), dtype=torch.int64)
    all_gather_into_tensor(everyone, told, group)
    unpacked = _all_new(packed, group) if everyone[:, 1].any() else [[]] * group.size
    asked = bool((everyone[:, 0] & ASKS).any())
    stacks = _all_texts(stack(), group) if asked else [""] * group.size
    return [
        News(
            [*map(cache.request, cache.from_words(row[2:])), *unpacked[rank]],
            bool(row[0] & JOINED),
            bool(row[0] & LEAVING),
            bool(row[0] & ASKS),
            stacks[rank],
        )
        for rank, row in enumerate(everyone)
    ]


def _all_new(packed: bytes, group: Group) -> list[list[Request]]:
    """Return the requests that are new to the cache, by rank."""
    return [_unpack(piece) for piece in _all_bytes(packed, group)]


def _all_texts(text: str, group: Group) -> list[str]:
    return [piece.decode() for piece in _all_bytes(text.encode(errors="replace"), group)]


def _all_bytes(mine: bytes, group: Group) -> list[bytes]:
    gathered = all_gather_ragged(torch.tensor(list(mine), dtype=torch.uint8), group)
    return [piece.numpy().tobytes() for piece in gathered]


def _unpack(piece: bytes) -> list[Request]:
    fields: Iterable[tuple[object, ...]] = pickle.loads(piece) if piece else ()
    return [Request(*each) for each in fields]  # type: ignore[arg-type]
