"""Which rank holds whose replica, and what is restored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.elastic import PerRank, buddy_replicas
from mpisgd.elastic.buddy_replicas import BuddyReplicas, buddy_of


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_a_buddy_is_another_rank_and_on_another_host_if_there_are_several(sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    nodes = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    for host, ranks in enumerate(nodes):
        for rank in ranks:
            buddy = buddy_of(nodes, rank)
            assert 0 <= buddy < sum(sizes)
            if len(nodes) > 1:
                assert buddy not in nodes[host]
            elif len(ranks) > 1:
                assert buddy != rank


class World:
    """Ranks whose turn it is one after the other; what they send in a restore is known to all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank, self.size = 0, 1
        self.sent: dict[int, bytes] = {}
        self.held: dict[int, tuple[list[int], int]] = {}
        patched = {
            "rank": lambda: self.rank,
            "size": lambda: self.size,
            "topology": lambda: SimpleNamespace(nodes=[list(range(self.size))]),
            "_exchange": self._exchange,
            "all_gather_object": self._all_gather,
            "broadcast_object": lambda obj, src: obj if src == self.rank else self.sent[src],
        }
        for name, function in patched.items():
            monkeypatch.setattr(buddy_replicas, name, function)

    def _exchange(self, mine: bytes, buddy: int, owners: list[int]) -> dict[int, bytes]:
        return dict.fromkeys(owners, mine)

    def _all_gather(self, out: list[Any], mine: tuple[list[int], int]) -> None:
        out[:] = [self.held.get(rank, mine) for rank in range(self.size)]


def test_a_commit_among_more_ranks_that_was_not_finished_does_not_matter(monkeypatch):
    # Commit 1 was of two ranks, commit 2, of three, was begun here when a rank was lost: false StateLost.
    world, got = World(monkeypatch), {}
    values = {"x": PerRank(lambda: 7.0, got.update)}
    replicas = BuddyReplicas()
    world.size = 2
    replicas.save(1, values)
    world.size = 3
    replicas.save(2, values)
    world.size, world.held = 2, {1: ([], 0)}  # rank 1 has joined
    replicas.restore(1, values)
    assert got == {0: 7.0, 1: 7.0}
