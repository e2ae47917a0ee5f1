"""Closed forms of collectives beside the simulation of their messages, on clusters that are drawn.

The two share no formula: one adds up loads of links round by round, the other lets messages flow.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.network import FatTree, Switch, Torus
from mpisgd.tools.plan.simulation.by_message import coordinates, simulate_messages, walk_torus
from mpisgd.tools.plan.simulation.collectives import cost_of, cost_of_rounds
from mpisgd.tools.plan.simulation.engine import Task, simulate
from mpisgd.tools.plan.simulation.messages import ALL_REDUCE, HALVES, Round, collective_rounds

NEAR = 0.05


def drawn_network(draw):
    shape = draw.choice([(8,), (4, 4), (5, 7), (2, 3, 3), (4, 4, 4)])
    tree = FatTree(draw.choice([2, 3, 4, 8]), draw.choice([1.0, 2.0, 4.0]))
    return draw.choice([Switch(), tree, Torus(shape)])


def drawn_cluster(draw, most_ranks):
    """Any hosts and ranks, links from slow to fast, with and without what a message takes of a processor."""
    network, k = drawn_network(draw), draw.choice([1, 1, 2, 3, 4, 8])
    room = math.prod(network.shape) if isinstance(network, Torus) else most_ranks
    hosts = draw.randint(1, max(1, min(room, most_ranks // k)))
    between = Link(
        10 ** draw.uniform(-6, -4),
        10 ** draw.uniform(8, 10.5),
        draw.choice([1.0, 0.6]),
        draw.choice([0, 5e-7]),
    )
    within = Link(10 ** draw.uniform(-7, -5), 10 ** draw.uniform(9, 11), message_s=draw.choice([0, 1e-7]))
    shared = draw.random() < 0.5
    return Cluster(hosts, k, between, within, network, within_is_shared=shared, memory_bytes_per_s=1e11)


def compare(seed, most_ranks, algorithms=tuple(ALL_REDUCE)):
    """What a drawn collective takes by both."""
    draw = random.Random(seed)
    cluster, nbytes = drawn_cluster(draw, most_ranks), 10 ** draw.uniform(2, 9)
    algorithm, collective = draw.choice(algorithms), draw.choice(list(HALVES))
    simulated = simulate_messages(
        cluster, collective_rounds(collective, algorithm, cluster.placement, nbytes)
    )
    found = cost_of(cluster, algorithm, collective).seconds(nbytes)
    case = seed, algorithm, collective, nbytes, cluster
    assert found == pytest.approx(simulated, rel=NEAR, abs=1e-15), case


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_closed_forms_are_what_messages_take(first):
    for seed in range(first, first + 20):
        compare(seed, 20)


@pytest.mark.parametrize("seed", [14, 19, 80, 159, 273, 290, 421, 524, 552, 581, 706, 747, 789, 983])
def test_ranks_and_messages_that_come_late_are_what_messages_take(seed):
    """What rounds that are counted alone, or as if all began together, were off by 10 % and more in."""
    compare(seed, 20)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_closed_forms_are_what_messages_of_many_ranks_take(seed):
    compare(seed, 96)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2000, 2060))
def test_closed_forms_are_what_messages_of_up_to_512_ranks_take(seed):
    compare(seed, 512, ("ring", "halving_doubling", "tree", "hierarchical"))


@pytest.mark.long
@pytest.mark.parametrize(("hosts", "k"), [(512, 1), (64, 8)])
@pytest.mark.parametrize(
    "network", [Switch(), FatTree(16, 4.0), Torus((8, 8, 8)), Torus((4, 4, 32))], ids=str
)
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "tree", "hierarchical"])
def test_closed_forms_of_512_ranks(algorithm, network, hosts, k):
    cluster = Cluster(hosts, k, Link(1e-5, 1e9), Link(1e-6, 1e10), network)
    nbytes = 3e7
    simulated = simulate_messages(
        cluster, collective_rounds("all_reduce", algorithm, cluster.placement, nbytes)
    )
    assert cost_of(cluster, algorithm).seconds(nbytes) == pytest.approx(simulated, rel=NEAR)


# -- a simulation that can be believed -----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (4, 4), (2, 3, 2)])
def test_a_message_is_walked_the_shortest_way(shape):
    """As far as the coordinates are apart, around each ring the shorter way; from neighbour to neighbour."""
    for src in range(math.prod(shape)):
        for dst in range(math.prod(shape)):
            way = list(walk_torus(shape, src, dst))
            here, there = coordinates(shape, src), coordinates(shape, dst)
            apart = [abs(a - b) for a, b in zip(here, there, strict=True)]
            assert len(way) == sum(min(a, n - a) for a, n in zip(apart, shape, strict=True))
            corners = [here, *(corner for _, corner in way)]
            assert corners[-1] == there
            assert [first for first, _ in way] == corners[:-1]


@pytest.mark.parametrize("seed", range(8))
def test_messages_share_links_as_tasks_of_the_engine_do(seed):
    """Of one round, which both can: messages of different ways and rates."""
    draw = random.Random(seed)
    pairs = [draw.sample(range(12), 2) for _ in range(14)]
    src, dst = np.array(pairs).T
    cluster = Cluster(6, 2, Link(1e-4, 1e9), Link(1e-5, 3e9), FatTree(2, 4.0), within_is_shared=False)
    tasks, capacities = [], {}
    for a, b in pairs:
        a_host, b_host = a // 2, b // 2
        needs = {("rank out", a): 3e9, ("rank in", b): 3e9}
        if a_host != b_host:
            needs = {("out", a_host): 1e9, ("in", b_host): 1e9}
            if a_host // 2 != b_host // 2:
                needs |= {("up", a_host // 2): 5e8, ("down", b_host // 2): 5e8}
        names = {f"{kind} {number}": rate for (kind, number), rate in needs.items()}
        capacities |= names
        latency_s = 1e-4 if a_host != b_host else 1e-5
        tasks.append(Task("", dict.fromkeys(names, 1e6), delay_s=latency_s))
    expected = max(span.end_s for span in simulate(tasks, capacities))
    assert simulate_messages(cluster, [Round(src, dst, 1e6)]) == pytest.approx(expected, rel=1e-6)


def test_a_line_of_its_own_where_neither_few_nor_many_bytes_are_what_counts():
    """Messages to a neighbour share its link with three others; one goes far, alone on its last links."""
    cluster = Cluster(9, 1, Link(1e-5, 1e9), Link(1e-6, 1e10), Torus((9,)))
    each = Round(np.array([0, 1, 2, 3]), np.array([4, 4, 4, 4]), 1.0)
    costs, _ = cost_of_rounds(cluster, [each])
    for nbytes in (1.0, 3e3, 1e4, 3e4, 1e6):
        simulated = simulate_messages(cluster, [Round(each.src, each.dst, nbytes)])
        assert costs.seconds(nbytes) == pytest.approx(simulated, rel=1e-9)
    assert len(costs.lines) == 2
