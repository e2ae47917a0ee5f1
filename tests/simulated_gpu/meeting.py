"""`Member`: what gloo is to the simulated NCCL, where the ranks are threads of one process.

gloo connects ranks while the host waits, and lets nobody else run meanwhile. Here each rank brings its
tensors to a round, and whoever comes last computes for all. Rounds in which the ranks bring different
things never end, as NCCL's.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpisgd.threads import scheduling

__all__ = ["Member", "ranks_are_threads"]

POLL_S = 0.0005
COMBINED = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
)
Brought = list[Any]  # of each rank, in order


def ranks_are_threads() -> bool:
    """Whether this thread is a rank of `run_ranks`."""
    return scheduling.scheduler() is not None


class Round:
    """One operation: what each rank has brought, and whether it is over."""

    def __init__(self) -> None:
        self.brought: dict[int, tuple[str, Any]] = {}
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        """Is over at once: as of gloo's works, called when it is completed."""


class _Meeting:
    """What the members share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.present: set[int] = set()
        self.rounds: defaultdict[int, Round] = defaultdict(Round)


_meetings: dict[str, _Meeting] = {}
_numbers = itertools.count()


class Member:
    """One rank of a meeting.

    Args:
        store: by which the ranks find each other; nobody else uses it.
        rank: this one.
        size: how many there are. Returns when all have come.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._own = itertools.count()
        if rank == 0:
            name = str(next(_numbers))
            _meetings[name] = _Meeting()
            store.set("meeting", name)
        _wait(lambda: store.check(["meeting"]))
        self._meeting = _meetings[store.get("meeting").decode()]
        self._meeting.present.add(rank)
        _wait(lambda: len(self._meeting.present) == size)

    def _bring(self, name: str, mine: Any, compute: Callable[[Brought], object]) -> Round:
        """Bring something to the next round; the last one computes what becomes of it."""
        number = next(self._own)
        with self._meeting.lock:
            this = self._meeting.rounds[number]
            this.brought[self._rank] = name, mine
            if len(this.brought) == self._size and len({told for told, _ in this.brought.values()}) == 1:
                compute([this.brought[rank][1] for rank in range(self._size)])
                this.is_over = True
                del self._meeting.rounds[number]
        return this

    def barrier(self) -> Round:
        return self._bring("barrier", None, lambda _: None)

    def allreduce(self, tensors: list[Tensor], op: Any) -> Round:
        combined = next(function for known, function in COMBINED if op == known)

        def compute(brought: Brought) -> None:
            total = functools.reduce(combined, brought)
            for place in brought:
                place.copy_(total)

        return self._bring(f"allreduce {tensors[0].shape} {combined}", tensors[0], compute)

    def broadcast(self, tensor: Tensor, root: int) -> Round:
        def compute(brought: Brought) -> None:
            for place in brought:
                place.copy_(brought[root])

        return self._bring(f"broadcast {tensor.shape} {root}", tensor, compute)

    def _allgather_base(self, out: Tensor, tensor: Tensor) -> Round:
        def compute(brought: Brought) -> None:
            everyones = torch.cat([given for _, given in brought])
            for place, _ in brought:
                place.copy_(everyones)

        return self._bring(f"all_gather {tensor.shape}", (out, tensor), compute)

    def alltoall_base(self, out: Tensor, tensor: Tensor, takes: Sequence[int], gives: Sequence[int]) -> Round:
        def compute(brought: Brought) -> None:
            parts = [given.split(list(sizes)) for _, given, sizes in brought]
            for rank, (place, _, _) in enumerate(brought):
                place.copy_(torch.cat([of_rank[rank] for of_rank in parts]))

        return self._bring("all_to_all", (out, tensor, gives), compute)


def _wait(ready: Callable[[], bool]) -> None:
    while not ready():
        scheduling.sleep(POLL_S)
