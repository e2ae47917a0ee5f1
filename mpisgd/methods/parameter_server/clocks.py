"""`Clocks`: how far each worker has come, in memory that all of them read."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpisgd.arguments import ranks_text
from mpisgd.core.group import Group
from mpisgd.errors import CollectiveTimeout
from mpisgd.rma.patience import wait_patiently
from mpisgd.rma.window import Window
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.threads.waiting import cancel_reason

__all__ = ["BEGUN", "CLOCK", "DONE", "FINISHED", "LEAD", "PUSHED", "Clocks", "Counters"]

# A worker's words. Nobody else writes them, so no atomic operation is needed.
FINISHED, CLOCK, BEGUN, PUSHED, LEAD, DONE, NUM_WORDS = range(7)


class Counters(NamedTuple):
    """What a parameter server has counted; entries are in the order of the group's ranks.

    Attributes:
        clock: steps that a worker may go beyond, having read what the others have pushed.
        finished: steps of which the update is pushed. With `ssp`, no clock is more than `staleness_steps`
            larger than the smallest of these.
        begun: pushes that a worker has begun.
        pushed: pushes that it has completed.
        lead: the most steps that a worker has been ahead of the slowest when it began to compute.
        applied: [shards][ranks] updates of each rank that are in each shard: between `pushed` and `begun`,
            equal to both where no push is under way.
    """

    clock: list[int]
    finished: list[int]
    begun: list[int]
    pushed: list[int]
    lead: list[int]
    applied: list[list[int]]


class Clocks:
    """The words of all ranks. Collective.

    Args:
        workers: global ranks that count.
        group: all ranks.
    """

    def __init__(self, workers: Sequence[int], group: Group) -> None:
        self._group = group
        self._me = group.ranks[group.rank]
        self._others = [rank for rank in workers if rank != self._me]
        self.window = Window(torch.zeros(NUM_WORDS, dtype=torch.int64), group)

    def get(self, word: int) -> int:
        """Return a word of this rank's."""
        return int(self.window.tensor[word].item())

    def set(self, word: int, value: int) -> None:
        """Write a word of this rank's, after all that it has written before."""
        self.window.sync()
        self.window.tensor[word] = value
        self.window.sync()

    def of(self, rank: int) -> list[int]:
        """Return the words of a rank."""
        words: list[int] = self.window.get(torch.empty(NUM_WORDS, dtype=torch.int64), rank).tolist()
        return words

    def behind(self, word: int, value: int) -> list[int]:
        """Return the other workers whose word is smaller than that: neither lost nor done."""
        late = []
        for rank in self._others:
            words = self.of(rank)
            if words[word] < value and not words[DONE] and self.window.is_alive(rank):
                late.append(rank)
        return late

    def wait(self, word: int, value: int, limit_s: float) -> None:
        """Wait until this word of each other worker that is neither lost nor done has come to `value`.

        Raises:
            CollectiveTimeout: names those that have not.
            PeerLost: between hosts, a rank was lost.
        """
        late: list[int] = self.behind(word, value)

        def ready() -> bool:
            late[:] = self.behind(word, value)
            return not late

        def reason() -> WaitReason:
            return WaitReason("a parameter server's slowest workers", self._group.name, tuple(late))

        ends_with_rank = self.window.ends_with_rank
        if late and not wait_patiently(ready, limit_s, reason, ends_with_rank=ends_with_rank):
            raise CollectiveTimeout(
                f"ParameterServer: rank {self._me} has waited {limit_s:.1f} s for {ranks_text(late)}, whose "
                "steps are too far behind; a worker that makes no more steps calls synchronizer.finish()"
            )

    def check(self) -> None:
        """Raise where the loss of a rank has ended the window.

        Raises:
            PeerLost: then.
        """
        if self.window.ends_with_rank and (reason := cancel_reason()) is not None:
            raise reason

    def lead(self) -> int:
        """Return how many steps this worker is ahead of the slowest that is neither lost nor done."""
        mine = self.get(FINISHED)
        late = [self.of(rank)[FINISHED] for rank in self.behind(FINISHED, mine)]
        return mine - min([mine, *late])
