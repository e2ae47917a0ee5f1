"""All ranks come to the same decisions: the engine's steps between two messages, in one process.

Every simulated rank has a table and a cache of its own, and learns of the others by what they would send.
"""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.horovod.engine.request import Request, RequestCache
from mpisgd.horovod.engine.request_table import WORLD, Decision, RequestTable, fuse

SIZE, ROUNDS, NAMES = 3, 4, 5
MEMBERS = {WORLD: (0, 1, 2), 1: (0, 2)}

Sent = tuple[torch.Tensor, list[Request]]


def fused(decisions: list[Decision]) -> list[list[Decision]]:
    return fuse(decisions, [8] * len(decisions), 16)


class SimulatedRank:
    """One rank's state, and what it does in a cycle."""

    def __init__(self, capacity: int) -> None:
        self.table, self.cache = RequestTable(MEMBERS), RequestCache(capacity)

    def send(self, requests: list[Request]) -> Sent:
        slots = [slot for each in requests if (slot := self.cache.slot(each)) is not None]
        new = [each for each in requests if self.cache.slot(each) is None]
        return torch.tensor(self.cache.as_words(slots), dtype=torch.int64), new

    def receive(self, everyone: list[Sent]) -> list[list[Decision]]:
        news = [[*map(self.cache.request, self.cache.from_words(words)), *new] for words, new in everyone]
        for rank, requests in enumerate(news):
            for each in requests:
                self.table.submit(rank, each)
        batches = fused(self.table.decide())
        for batch in batches:
            for decision in batch:
                self.cache.use(decision.request)
        return batches


def operations(round_: int) -> list[Request]:
    """What happens in one round: the names come back, one with another shape every time."""
    alike = [
        Request(f"allreduce.{i}", "allreduce", i % 2, "Sum", ("float32",), ((i,),)) for i in range(NAMES)
    ]
    return [*alike, Request("allgather.new", "allgather", WORLD, "", ("float32",), ((round_,),))]


@given(st.integers(0, 8), st.integers(0, 2**32 - 1))
def test_decisions_and_caches_are_alike_on_all_ranks(capacity, seed):
    draw = random.Random(seed)
    ranks = [SimulatedRank(capacity) for _ in range(SIZE)]
    for round_ in range(ROUNDS):
        waiting = [
            [each for each in operations(round_) if rank in MEMBERS[each.set_id]] for rank in range(SIZE)
        ]
        decided: list[Request] = []
        for requests in waiting:
            draw.shuffle(requests)
        while any(waiting):
            told = [[requests.pop() for _ in range(draw.randint(0, len(requests)))] for requests in waiting]
            everyone = [rank.send(requests) for rank, requests in zip(ranks, told, strict=True)]
            views = [rank.receive(everyone) for rank in ranks]
            assert views[1:] == views[:-1]
            decided += [decision.request for batch in views[0] for decision in batch]
        assert sorted(decided) == sorted(operations(round_))
        known = [[rank.cache.slot(each) for each in operations(round_)] for rank in ranks]
        assert known[1:] == known[:-1]
