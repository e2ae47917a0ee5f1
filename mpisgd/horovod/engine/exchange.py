"""`exchange`: in every cycle all ranks learn what each has submitted since the last one.

One all-gather of a small fixed message: flags, and a bit for each known request. A second one
follows where a rank has submitted a request that is not in the cache, with these requests.
"""

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.collectives.all_gather_ragged import all_gather_ragged
from mpisgd.core.group import Group
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.request_cache import RequestCache

__all__ = ["CycleMessage", "exchange"]

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
    packed = pickle.dumps([tuple(request) for request in new]) if new else b""
    flags = JOINED * mine.joined | LEAVING * mine.leaving | WANTS_STACKS * mine.wants_stacks
    sent = torch.tensor([flags, len(packed), *cache.as_words(known)])
    everyone = torch.empty(group.size, len(sent), dtype=torch.int64)
    all_gather_into_tensor(everyone, sent, group)
    unpacked = _all_new(packed, group) if everyone[:, 1].any() else [[]] * group.size
    asked = bool((everyone[:, 0] & WANTS_STACKS).any())
    stacks = _all_texts(stack(), group) if asked else [""] * group.size
    return [
        CycleMessage(
            [*map(cache.request, cache.from_words(row[2:])), *unpacked[rank]],
            bool(row[0] & JOINED),
            bool(row[0] & LEAVING),
            bool(row[0] & WANTS_STACKS),
            stacks[rank],
        )
        for rank, row in enumerate(everyone)
    ]


def _all_new(packed: bytes, group: Group) -> list[list[Request]]:
    """Return the requests that are not in the cache, by rank."""
    return [_unpack(piece) for piece in _all_bytes(packed, group)]


def _all_texts(text: str, group: Group) -> list[str]:
    return [piece.decode() for piece in _all_bytes(text.encode(errors="replace"), group)]


def _all_bytes(mine: bytes, group: Group) -> list[bytes]:
    gathered = all_gather_ragged(torch.tensor(list(mine), dtype=torch.uint8), group)
    return [piece.numpy().tobytes() for piece in gathered]


def _unpack(piece: bytes) -> list[Request]:
    fields: Iterable[tuple[object, ...]] = pickle.loads(piece) if piece else ()
    return [Request(*each) for each in fields]  # type: ignore[arg-type]
