"""What is sent of the state of pieces: each element to its owner, and nothing twice."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.sharding.division import Item, Member, divide
from mpisgd.sharding.piece import PieceState
from mpisgd.sharding.state_exchange import _owned_by


def states_of(ranges) -> list[PieceState]:
    """States whose elements are their own places in their parameters."""
    return [
        PieceState(m, {"exp_avg": torch.arange(m.first, m.first + m.numel)}, {"step": 3})
        for range_ in ranges
        for m in range_.members
    ]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 4))
def test_each_owner_gets_each_of_its_elements_once(sizes, before, after):
    items = [Item(i, numel, 4, (0, "float32", False)) for i, numel in enumerate(sizes)]
    old = [states_of(of_one) for of_one in divide(items, (), before, 256)]
    for ranges in divide(items, (), after, 512):
        got = [part for held in old for part in _owned_by(ranges, held)]
        places = [(p.member.param, int(at)) for p in got for at in p.cut["exp_avg"]]
        owned = [(m.param, m.first + i) for range_ in ranges for m in range_.members for i in range(m.numel)]
        assert sorted(places) == sorted(owned)
        assert all(len(p.cut["exp_avg"]) == p.member.numel and p.kept == {"step": 3} for p in got)
        assert all(p.cut["exp_avg"][0] == p.member.first for p in got if p.member.numel)


def test_the_state_of_a_whole_parameter_comes_once():
    state = PieceState(Member(0, 0, 64, 0), {}, {"rows": torch.ones(8)})
    ranges = divide([Item(0, 64, 4, (0, "float32", True))], (), 1, 64)[0]
    assert len(ranges) > 1
    assert _owned_by(ranges, [state]) == [state]
