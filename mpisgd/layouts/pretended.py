"""`pretended_ranks`: torch.distributed as in a job of so many ranks, of which there is only this one.

What a layout costs is counted by doing it without numbers, and so it can be asked about before there is a
job, and of other numbers of ranks than a job has. torch's backend "fake" has groups that send nothing.
"""

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import _random

__all__ = ["mark_of_pretended", "pretended_ranks"]


@dataclass
class _Ranks:
    """Ranks that were pretended.

    Attributes:
        number: which ones, of all since the process began.
        world: what torch knows of their groups.
        next_name: of a group; torch calls them by numbers, and those of each ranks begin at another million.
    """

    number: int
    world: Any
    next_name: int


_lock = threading.Lock()
_pretended: dict[int, _Ranks] = {}  # by how many they are
_numbers = itertools.count(1)
NAMES_APART = 10**6


@contextmanager
def pretended_ranks(num_ranks: int) -> Iterator[None]:
    """Inside, torch's default group is one of so many ranks, and this is rank 0 of them.

    The program's own groups are there again behind it. Meanwhile no other thread may use torch.distributed.
    """
    with _lock:
        before = distributed_c10d._world, sys.excepthook, _random._rng_tracker
        count = before[0].group_count  # one of all worlds together
        try:
            ranks = _enter(num_ranks)
            try:
                yield
            finally:
                ranks.next_name = distributed_c10d._world.group_count
        finally:
            distributed_c10d._world, sys.excepthook, _random._rng_tracker = before
            distributed_c10d._world.group_count = count


def _enter(num_ranks: int) -> _Ranks:
    ranks = _pretended.get(num_ranks)
    if ranks is not None and _is_registered(ranks.world):
        distributed_c10d._world = ranks.world
        distributed_c10d._world.group_count = ranks.next_name
        return ranks
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    number, world = next(_numbers), distributed_c10d._World()
    distributed_c10d._world = world
    distributed_c10d._world.group_count = number * NAMES_APART
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    found = _pretended[num_ranks] = _Ranks(number, world, distributed_c10d._world.group_count)
    return found


def _is_registered(world: Any) -> bool:
    """Return whether torch finds the groups by their names: not once the program has destroyed its own."""
    try:
        _resolve_process_group(world.default_pg.group_name)
    except RuntimeError:
        return False
    return True


def mark_of_pretended() -> str:
    """Return a mark that other and earlier pretended ranks do not have; "" where ranks are real."""
    now = (ranks.number for ranks in _pretended.values() if ranks.world is distributed_c10d._world)
    return next((f" of pretended ranks, {number}" for number in now), "")
