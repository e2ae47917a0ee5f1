"""The graphs as plain data: who sends to whom, the weights, and how fast they mix."""

from __future__ import annotations

import math

import pytest
import torch

from mpisgd.errors import InvalidArgument
from mpisgd.gossip import (
    Complete,
    Exponential,
    Graph,
    Hypercube,
    OnePeerExponential,
    RandomPairs,
    Ring,
    Star,
    Torus,
)
from mpisgd.gossip.graphs import NAMED_GRAPHS, as_graph

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 16, 64]
UNDIRECTED = [Ring(), Torus(), Hypercube(), Star(), Complete(), RandomPairs(seed=3)]


def pairs() -> list[tuple[Graph, int]]:
    """Every graph at every size that it has."""
    every = [(graph, size) for graph in NAMED_GRAPHS.values() for size in SIZES]
    return [(graph, size) for graph, size in every if graph != Hypercube() or size & (size - 1) == 0]


def name(value: object) -> str | None:
    return type(value).__name__ if isinstance(value, Graph) else None


@pytest.mark.parametrize(("graph", "size"), pairs(), ids=name)
def test_every_graph_is_doubly_stochastic_and_symmetric_if_undirected(graph, size):
    for step in range(5):
        matrix = graph.matrix(size, step)
        ones = torch.ones(size, dtype=torch.float64)
        assert (matrix >= 0).all()
        torch.testing.assert_close(matrix.sum(0), ones, rtol=0, atol=1e-14)
        torch.testing.assert_close(matrix.sum(1), ones, rtol=0, atol=1e-14)
        assert torch.equal(matrix, matrix.T) or graph not in UNDIRECTED


@pytest.mark.parametrize(("graph", "size"), pairs(), ids=name)
def test_from_every_rank_something_comes_to_every_other(graph, size):
    product = torch.eye(size, dtype=torch.float64)
    phases = graph.num_phases(size)
    matrices = [graph.matrix(size, step) for step in range(phases or 4 * size)]
    for step in range(4 * size):
        product = matrices[step % len(matrices)] @ product
    assert (product > 0).all()
    graph.check_mixing("a test", size, doubly=True)


@pytest.mark.parametrize(("graph", "size"), pairs(), ids=name)
def test_ranks_send_what_others_receive(graph, size):
    for step in (0, 1, 5):
        exchanges = [graph.exchange(rank, size, step) for rank in range(size)]
        sent = {(src, dst) for src, each in enumerate(exchanges) for dst in each.destinations}
        received = {(src, dst) for dst, each in enumerate(exchanges) for src in each.sources(dst)}
        assert sent == received
        assert all(src != dst for src, dst in sent)


@pytest.mark.parametrize(
    ("graph", "size", "degree"),
    [
        (Ring(), 8, 2),
        (Torus(), 16, 4),
        (Torus(), 6, 3),
        (Torus(), 7, 2),
        (Hypercube(), 64, 6),
        (Exponential(), 8, 3),
        (Exponential(), 6, 3),
        (OnePeerExponential(), 8, 1),
        (Complete(), 5, 4),
    ],
    ids=name,
)
def test_on_a_regular_graph_all_weights_are_the_same(graph, size, degree):
    for rank in range(size):
        exchange = graph.exchange(rank, size)
        assert len(exchange.destinations) == degree
        assert {weight for _, weight in exchange.terms} == {1 / (degree + 1)}
        assert len(exchange.terms) == degree + 1


@pytest.mark.parametrize("size", [8, 16, 64])
def test_spectral_gaps_in_closed_form(size):
    assert Ring().spectral_gap(size) == pytest.approx((2 - 2 * math.cos(2 * math.pi / size)) / 3, abs=1e-12)
    assert Hypercube().spectral_gap(size) == pytest.approx(2 / (1 + math.log2(size)), abs=1e-12)
    assert Star().spectral_gap(size) == pytest.approx(1 / size, abs=1e-9)
    assert Complete().spectral_gap(size) == pytest.approx(1, abs=1e-9)
    # Ying and others 2021, proposition 1, for even log2(size) + 1 or not: 2 / (1 + ceil(log2(size)))
    assert Exponential().spectral_gap(size) == pytest.approx(2 / (1 + math.log2(size)), abs=1e-9)


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_one_peer_is_exact_after_one_period_of_a_power_of_two(size):
    product = torch.eye(size, dtype=torch.float64)
    for step in range(OnePeerExponential().num_phases(size)):
        product = OnePeerExponential().matrix(size, step) @ product
    torch.testing.assert_close(product, torch.full_like(product, 1 / size), rtol=0, atol=1e-14)
    assert OnePeerExponential().spectral_gap(size) == 1


@pytest.mark.parametrize("size", [4, 5, 8])
def test_the_gap_of_random_pairs_is_that_of_their_mean(size):
    num = 4000
    mean = torch.stack([RandomPairs(1).matrix(size, step) for step in range(num)]).mean(0)
    moduli = torch.linalg.eigvals(mean).abs().sort(descending=True).values
    assert RandomPairs().spectral_gap(size) == pytest.approx(1 - moduli[1].item(), abs=0.03)


def test_random_pairs_differ_by_step_and_by_seed():
    steps = {str(RandomPairs().matrix(8, step)) for step in range(8)}
    assert len(steps) > 4
    assert any(not torch.equal(RandomPairs(1).matrix(8, s), RandomPairs(2).matrix(8, s)) for s in range(3))


def test_a_torus_is_as_square_as_it_can_be():
    def neighbours(rank: int, size: int) -> tuple[int, ...]:
        return Torus().exchange(rank, size).destinations

    assert neighbours(0, 12) == (1, 3, 4, 8)  # 3 rows of 4
    assert neighbours(5, 16) == (1, 4, 6, 9)
    assert neighbours(0, 7) == (1, 6)


def test_a_hypercube_needs_a_power_of_two():
    with pytest.raises(InvalidArgument, match="there are 6 ranks; a hypercube has a power of two"):
        Hypercube().exchange(0, 6)


@pytest.mark.parametrize("graph", NAMED_GRAPHS.values(), ids=name)
def test_a_graph_prints_compares_and_is_found_by_its_name(graph):
    text = next(text for text, other in NAMED_GRAPHS.items() if other is graph)
    assert as_graph("a test", text) == graph
    assert eval(repr(graph)) == graph
    assert len({repr(other) for other in NAMED_GRAPHS.values()}) == len(NAMED_GRAPHS)


@pytest.mark.parametrize("topology", ["circle", 3, None, b"ring", object()])
def test_what_is_no_topology_is_refused(topology):
    with pytest.raises(InvalidArgument, match=r"a test: topology=|topology"):
        as_graph("a test", topology)
