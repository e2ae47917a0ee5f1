"""Ranks by host, as data: hosts of any size, ranks dealt out in any way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.core.topology import Topology, arrange


def on_hosts(hosts: list[str], rank: int) -> Topology:
    """The topology seen by `rank` when rank r runs on `hosts[r]`."""
    return arrange(rank, [hosts.index(host) for host in hosts], hosts)


@pytest.mark.parametrize(
    ("hosts", "nodes", "names"),
    [
        ("a", [(0,)], "a"),
        ("aaaa", [(0, 1, 2, 3)], "a"),
        ("aabb", [(0, 1), (2, 3)], "ab"),
        ("abab", [(0, 2), (1, 3)], "ab"),
        ("aab", [(0, 1), (2,)], "ab"),
        ("baacb", [(0, 4), (1, 2), (3,)], "bac"),
    ],
)
def test_hosts_are_ordered_by_their_lowest_rank(hosts, nodes, names):
    where = on_hosts(list(hosts), 0)
    assert where.nodes == tuple(nodes)
    assert where.hostnames == tuple(names)


def test_hosts_of_one_name_are_told_apart_by_their_leaders():
    where = arrange(3, [0, 0, 2, 2], ["node", "node", "node", "node"])
    assert where.nodes == ((0, 1), (2, 3))
    assert (where.node_rank, where.local_rank, where.num_nodes) == (1, 1, 2)


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=20))
def test_every_rank_has_one_place(hosts):
    views = [on_hosts(hosts, rank) for rank in range(len(hosts))]
    assert len({(view.node_rank, view.local_rank) for view in views}) == len(hosts)
    for rank, view in enumerate(views):
        assert view.size == len(hosts)
        assert view.num_nodes == len(set(hosts))
        assert view.hostnames[view.node_rank] == hosts[rank]
        assert view.nodes[view.node_rank][view.local_rank] == rank
        assert view.local_size == hosts.count(hosts[rank])
        assert view.nodes == views[0].nodes
