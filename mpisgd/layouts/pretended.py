"""`pretended_ranks`: torch.distributed as in a job of so many ranks, of which there is only this one.

What a layout costs is counted by doing it without numbers, and so it can be asked about before there is a
job, and of other numbers of ranks than a job has. torch's backend "fake" has groups that send nothing.
"""

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import _random

__all__ = ["mark_of_pretended", "pretended_ranks"]

_lock = threading.Lock()
_worlds: dict[
    int, tuple[int, Any]
] = {}  # what torch knows of groups, by their number of ranks, with a number
_numbers = itertools.count(1)
NAMES_APART = 10**6  # torch's groups are called by numbers: those of each world begin at another million


@contextmanager
def pretended_ranks(num_ranks: int) -> Iterator[None]:
    """Inside, torch's default group is one of so many ranks, and this is rank 0 of them.

    The program's own groups are there again behind it. Meanwhile no other thread may use torch.distributed.
    """
    with _lock:
        before = distributed_c10d._world, sys.excepthook, _random._rng_tracker
        try:
            _enter(num_ranks)
            yield
        finally:
            distributed_c10d._world, sys.excepthook, _random._rng_tracker = before


def _enter(num_ranks: int) -> None:
    number, world = _worlds.get(num_ranks, (0, None))
    if world is not None and _is_registered(world):
        distributed_c10d._world = world
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    number, world = next(_numbers), distributed_c10d._World()
    world.group_count = number * NAMES_APART
    distributed_c10d._world = world
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    _worlds[num_ranks] = number, world


def _is_registered(world: Any) -> bool:
    """Return whether torch finds the groups by their names: not once the program has destroyed its own."""
    try:
        _resolve_process_group(world.default_pg.group_name)
    except RuntimeError:
        return False
    return True


def mark_of_pretended() -> str:
    """Return what tells pretended ranks from others, and from those of before; "" where they are real."""
    numbers = (number for number, world in _worlds.values() if world is distributed_c10d._world)
    return next((f" of pretended ranks, {number}" for number in numbers), "")
