"""Who asks and who answers: connected whatever the graph, and nobody does both."""

from __future__ import annotations

import pytest

from mpisgd.gossip import Hypercube, Ring, Star
from mpisgd.gossip.graphs import NAMED_GRAPHS
from mpisgd.methods.gossip.ad_psgd.bipartite import roles_of

SIZES = [2, 3, 4, 5, 6, 7, 8, 9, 16, 64]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMED_GRAPHS)
def test_what_is_left_of_a_graph_is_connected_and_bipartite(name, size):
    if name == "hypercube" and size & (size - 1):
        pytest.skip("no such hypercube")
    roles = roles_of(NAMED_GRAPHS[name], size)
    seen, ahead = {0}, [0]
    while ahead:
        rank = ahead.pop()
        for other in roles.partners[rank]:
            assert roles.asks[rank] != roles.asks[other]
            assert rank in roles.partners[other]
            if other not in seen:
                seen.add(other)
                ahead.append(other)
    assert seen == set(range(size))
    assert all(roles.partners)


@pytest.mark.parametrize("graph", [Ring(), Hypercube(), Star()])
def test_of_a_bipartite_graph_every_edge_is_left(graph):
    roles = roles_of(graph, 16)
    assert [sorted(each) for each in graph.destinations(16, 0)] == [list(each) for each in roles.partners]


def test_of_a_complete_graph_half_of_the_ranks_ask():
    roles = roles_of(NAMED_GRAPHS["complete"], 8)
    assert sum(roles.asks) == 4
    assert all(len(each) == 4 for each in roles.partners)
