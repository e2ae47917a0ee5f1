"""Which ranks ask and which answer, where pairs of ranks average whenever one of them wants to.

A rank that asks waits for the answer, so ranks that ask each other in a circle would wait for ever. So each
rank does only one of the two: the graph is cut into those that ask and those that answer, and only edges
between both are used.

Source: Lian and others 2018, "Asynchronous decentralized parallel stochastic gradient descent", section 3.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mpisgd.gossip.graph import Graph

__all__ = ["Roles", "roles_of"]


class Roles(NamedTuple):
    """Who asks whom.

    Attributes:
        asks: for each rank, whether it asks; the others answer.
        partners: for each rank, its neighbours of the other kind, ascending.
    """

    asks: tuple[bool, ...]
    partners: tuple[tuple[int, ...], ...]


def roles_of(graph: Graph, size: int) -> Roles:
    """Cut a graph in two, such that what is left of it is connected.

    Ranks of even number ask, where that leaves the graph connected: half of the ranks then, whatever the
    graph. Else it is those at an even distance from rank 0, which keeps every edge of a bipartite graph and
    at least a tree of any other.
    """
    edges = _edges(graph, size)
    roles = _cut(edges, [rank % 2 == 0 for rank in range(size)])
    if len(_distances(roles.partners)) == size:
        return roles
    distances = _distances(edges)
    return _cut(edges, [distances[rank] % 2 == 0 for rank in range(size)])


def _edges(graph: Graph, size: int) -> list[list[int]]:
    """Return the neighbours of each rank in any phase and in either direction; if it never repeats, all."""
    phases = graph.num_phases(size)
    found: list[set[int]] = [set() if phases else set(range(size)) - {rank} for rank in range(size)]
    for step in range(phases or 0):
        for src, targets in enumerate(graph.destinations(size, step)):
            for dst in targets:
                found[src].add(dst)
                found[dst].add(src)
    return [sorted(each) for each in found]


def _cut(edges: Sequence[Sequence[int]], asks: Sequence[bool]) -> Roles:
    partners = [[other for other in edges[rank] if asks[other] != asks[rank]] for rank in range(len(edges))]
    return Roles(tuple(asks), tuple(map(tuple, partners)))


def _distances(edges: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return how many edges lie between rank 0 and each rank that can be reached from it."""
    distances, ahead = {0: 0}, [0]
    for rank in ahead:  # grows meanwhile
        for other in edges[rank]:
            if other not in distances:
                distances[other] = distances[rank] + 1
                ahead.append(other)
    return distances
