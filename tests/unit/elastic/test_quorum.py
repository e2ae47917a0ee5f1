"""Who goes on after a loss, as data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.job.recovery import has_quorum, silent_hosts

hosts_strategy = st.lists(st.integers(1, 3), min_size=1, max_size=5)


def numbered(sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


@given(hosts_strategy, st.data())
def test_of_two_parts_of_a_cut_network_exactly_one_goes_on(sizes, data):
    nodes = numbered(sizes)
    here = data.draw(st.sets(st.integers(0, len(nodes) - 1), max_size=len(nodes)))
    one = [rank for host in here for rank in nodes[host]]
    other = [rank for host, ranks in enumerate(nodes) if host not in here for rank in ranks]
    verdicts = [has_quorum(nodes, part) for part in (one, other) if part]
    assert verdicts.count(True) == 1


@given(hosts_strategy, st.data())
def test_ranks_that_die_while_a_neighbour_lives_never_stop_the_others(sizes, data):
    nodes = numbered(sizes)
    left = {data.draw(st.sampled_from(ranks)) for ranks in nodes}
    left |= data.draw(st.sets(st.integers(0, sum(sizes) - 1)))
    assert has_quorum(nodes, left)


@pytest.mark.parametrize(
    ("nodes", "left", "expected"),
    [
        ([[0, 1], [2, 3]], [0, 1], True),
        ([[0, 1], [2, 3]], [2, 3], False),
        ([[0, 1], [2, 3]], [0], False),  # one of two was killed, and two may be alive elsewhere
        ([[0, 1, 2, 3]], [3], True),
        ([[0], [1], [2]], [1, 2], True),
        ([[0], [1], [2]], [0], False),
    ],
)
def test_cases(nodes, left, expected):
    assert has_quorum(nodes, left) is expected


def test_a_host_is_silent_when_none_of_its_ranks_is_left():
    assert silent_hosts([[0, 1], [2], [3, 4]], {1, 4}) == [1]
