"""Which rank holds whose replica."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpisgd.elastic.buddy_replicas import buddy_of


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
