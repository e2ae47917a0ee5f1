"""Collectives on a cluster: closed forms, contention, bytes, and the simulation of their messages."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpisgd.errors import InvalidArgument
from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.network import FatTree, Placement, Switch, Torus
from mpisgd.tools.plan.simulation.by_message import simulate_messages
from mpisgd.tools.plan.simulation.collectives import (
    cost_of,
    link_bytes,
    round_seconds,
)
from mpisgd.tools.plan.simulation.costs import Costs
from mpisgd.tools.plan.simulation.messages import ALL_REDUCE, Round, collective_rounds

ALPHA, RATE = 1e-5, 1e9
FAST = Link(1e-7, 1e12)
N = 1e6


def rounds_of(cluster, algorithm, nbytes):
    return collective_rounds("all_reduce", algorithm, cluster.placement, nbytes)


def hosts_of_one(count, network=None):
    return Cluster(count, 1, Link(ALPHA, RATE), FAST, network or Switch())


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 64])
def test_ring_takes_its_closed_form(p):
    expected = 2 * (p - 1) * (ALPHA + N / p / RATE)
    assert cost_of(hosts_of_one(p), "ring").seconds(N) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [2, 4, 8, 64])
def test_halving_and_doubling_takes_rabenseifners(p):
    expected = 2 * math.log2(p) * ALPHA + 2 * (p - 1) / p * N / RATE
    assert cost_of(hosts_of_one(p), "halving_doubling").seconds(N) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_tree_takes_two_logarithms_of_whole_messages(p):
    expected = 2 * math.log2(p) * (ALPHA + N / RATE)
    assert cost_of(hosts_of_one(p), "tree").seconds(N) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("p", "waited"), [(3, 3), (5, 5), (7, 5)])
def test_a_message_that_left_before_its_receiver_was_ready_costs_no_latency(p, waited):
    """Of 3, rank 2 has sent long before rank 0 has what rank 1 sent; of 5 and 7 it is rank 4, or 6."""
    expected = 2 * math.ceil(math.log2(p)) * N / RATE + waited * ALPHA
    assert cost_of(hosts_of_one(p), "tree").seconds(N) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("h", "k"), [(2, 1), (2, 2), (3, 4), (8, 8)])
def test_hierarchical_is_the_sum_of_its_levels(h, k):
    cluster = Cluster(h, k, Link(ALPHA, RATE), Link(1e-6, 1e10))
    between = 2 * (ALPHA + (h - 1) / h * N / RATE)
    # All of a host read k - 1 parts of n / k from its memory, twice.
    within = 2 * (1e-6 + (k - 1) * N / 1e10) if k > 1 else 0.0
    assert cost_of(cluster, "hierarchical").seconds(N) == pytest.approx(between + within, rel=1e-12)


def test_a_logarithm_more_where_ranks_are_no_power_of_two():
    """Less a latency: what rank 0 is sent in the first halving has left before rank 4 is done with it."""
    p5, p4 = (cost_of(hosts_of_one(p), "halving_doubling") for p in (5, 4))
    assert p5.seconds(N) == pytest.approx(p4.seconds(N) + 2 * N / RATE + 2 * ALPHA, rel=1e-2)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "all_to_all", "hierarchical"])
def test_messages_of_equal_ranks_take_exactly_what_rounds_take(algorithm, p):
    cluster = hosts_of_one(p)
    expected = cost_of(cluster, algorithm).seconds(N)
    assert simulate_messages(cluster, rounds_of(cluster, algorithm, N)) == pytest.approx(expected, rel=1e-9)


# -- contention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("oversubscription", [1.0, 2.0, 4.0])
def test_an_oversubscribed_fat_tree_slows_down_what_leaves_its_leaves(oversubscription):
    """All 4 hosts of a leaf send to the other leaf at once: the uplink is 4 links / oversubscription."""
    network = FatTree(4, oversubscription)
    cluster = hosts_of_one(8, network)
    halving = rounds_of(cluster, "halving_doubling", N)[0]
    assert halving.nbytes == N / 2
    plain = ALPHA + N / 2 / RATE
    expected = ALPHA + N / 2 / RATE * max(1.0, oversubscription)
    assert simulate_messages(cluster, [halving]) == pytest.approx(expected, rel=1e-9)
    assert simulate_messages(hosts_of_one(8), [halving]) == pytest.approx(plain, rel=1e-9)


def test_a_ring_crosses_a_leafs_uplink_once_and_does_not_mind():
    tree, switch = (cost_of(hosts_of_one(16, network), "ring") for network in (FatTree(4, 4.0), Switch()))
    assert tree == switch


def test_everyone_with_everyone_over_a_fat_tree():
    """Of the 7 messages of a host 4 leave its leaf of 4: 16 pass an uplink of one link's rate."""
    cluster = hosts_of_one(8, FatTree(4, 4.0))
    expected = 2 * (ALPHA + 16 * N / 8 / RATE)
    assert cost_of(cluster, "hierarchical").seconds(N) == pytest.approx(expected, rel=1e-12)
    assert simulate_messages(cluster, rounds_of(cluster, "hierarchical", N)) == pytest.approx(
        expected, rel=1e-9
    )


def test_neighbours_on_a_torus_are_a_hop_apart_and_others_share_links():
    torus = Torus((4, 4))
    src, dst = np.array([0, 0, 0]), np.array([1, 4, 10])
    assert torus.hops(src, dst).tolist() == [1, 1, 4]
    loads = list(torus.crossings(np.array([0]), np.array([10])))
    assert [(each.level, each.links.tolist()) for each in loads] == [
        ("dimension 0 +", [0]),
        ("dimension 0 +", [4]),
        ("dimension 1 +", [8]),
        ("dimension 1 +", [9]),
    ]


def test_a_torus_goes_backwards_where_that_is_shorter():
    (crossing,) = Torus((5,)).crossings(np.array([0]), np.array([4]))
    assert (crossing.level, crossing.links.tolist()) == ("dimension 0 -", [0])


NETWORKS = [
    Switch(),
    FatTree(4, 2.0),
    *(Torus(shape) for shape in ((4,), (5,), (2, 3), (3, 3), (4, 4), (2, 3, 2), (3, 1, 4))),
]


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_what_links_carry_if_all_send_is_what_the_messages_of_the_hosts_in_use_add_up_to(network):
    for hosts in range(2, (math.prod(network.shape) if isinstance(network, Torus) else 11) + 1):
        src, dst = (axis.ravel() for axis in np.divmod(np.arange(hosts**2), hosts))
        src, dst = src[src != dst], dst[src != dst]
        carried = {}
        for crossing in network.crossings(src, dst):
            links = np.bincount(crossing.links, minlength=hosts**2)
            carried[crossing.level] = carried.get(crossing.level, 0) + links
        expected = {level: (links.max(), links.sum()) for level, links in carried.items() if links.any()}
        found = {each.level: (each.busiest, each.total) for each in network.if_all_send(hosts) if each.total}
        assert found == expected, hosts
        by_hops = network.busiest_by_hops(hosts)
        assert by_hops[0] == (1.0, max(each.busiest / each.width for each in network.if_all_send(hosts)))
        assert by_hops[-1][0] >= network.hops(src, dst).max(), hosts


def test_messages_of_several_hops_that_meet_on_a_link_share_it():
    """Hosts 0 to 2 of a ring of 8 send four hosts on: the link from 3 to 4 carries all three."""
    each = Round(np.array([0, 1, 2]), np.array([4, 5, 6]), N)
    found = round_seconds(hosts_of_one(8, Torus((8,))), each)
    assert found.beta_s_per_byte == pytest.approx(3 * N / RATE)


@pytest.mark.parametrize(
    ("network", "level"), [(FatTree(4, 4.0), "leaf up"), (Torus((2, 4)), "dimension 1 +")]
)
def test_the_busiest_link_of_hierarchical_rounds_is_seen(network, level):
    cluster = Cluster(8, 2, Link(ALPHA, RATE), FAST, network)
    found = link_bytes(cluster, rounds_of(cluster, "hierarchical", N))
    assert found[level][0] > 0
    one_host_out = 2 * 7 / 8 * N
    assert found[level][0] == pytest.approx(one_host_out * (16 / 7 if level == "leaf up" else 6 / 7))


# -- bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("algorithm", ["ring", "all_to_all", "hierarchical"])
def test_every_host_sends_what_the_formula_says_and_receives_as_much(algorithm, p):
    found = link_bytes(hosts_of_one(p), rounds_of(hosts_of_one(p), algorithm, N))
    expected = 2 * (p - 1) / p * N
    for level in ("host out", "host in"):
        assert found[level] == pytest.approx((expected, p * expected))


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_a_reduce_scatter_and_an_all_gather_send_half_of_an_all_reduce_each(p):
    for half in ("reduce_scatter", "all_gather"):
        rounds = collective_rounds(half, "ring", Placement(p, 1), N)
        assert sum(each.repeats * each.nbytes for each in rounds) == pytest.approx((p - 1) / p * N)


def test_a_host_sends_once_whatever_number_of_ranks_it_has():
    cluster = Cluster(4, 8, Link(ALPHA, RATE), FAST)
    assert link_bytes(cluster, rounds_of(cluster, "hierarchical", N))["host out"][0] == pytest.approx(1.5 * N)
    assert link_bytes(cluster, rounds_of(cluster, "ring", N))["host out"][0] == pytest.approx(2 * 31 / 32 * N)


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_a_reduce_scatter_and_an_all_gather_are_an_all_reduce(algorithm):
    cluster = Cluster(4, 2, Link(ALPHA, RATE), FAST)
    halves = [cost_of(cluster, algorithm, half).seconds(N) for half in ("reduce_scatter", "all_gather")]
    assert sum(halves) == pytest.approx(cost_of(cluster, algorithm).seconds(N))


# -- sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_one_rank_sends_nothing(algorithm):
    assert cost_of(hosts_of_one(1), algorithm) == Costs(((0.0, 0.0),))


@pytest.mark.parametrize("algorithm", ["hierarchical", "ring", "halving_doubling", "tree"])
def test_more_bytes_take_longer_and_a_faster_link_less(algorithm):
    for network in (Switch(), FatTree(2, 2.0), Torus((2, 4))):
        cluster = hosts_of_one(8, network)
        faster = Cluster(8, 1, Link(ALPHA, 2 * RATE), FAST, network)
        assert 0 < cost_of(cluster, algorithm).seconds(N) < cost_of(cluster, algorithm).seconds(2 * N)
        assert cost_of(faster, algorithm).seconds(N) < cost_of(cluster, algorithm).seconds(N)


@pytest.mark.parametrize("network", [Switch(), FatTree(32, 4.0), Torus((24, 24, 22))])
def test_a_hundred_thousand_ranks(network):
    cluster = Cluster(12_500, 8, Link(ALPHA, RATE), FAST, network)
    ring = 2 * (cluster.size - 1) * ALPHA
    assert cost_of(cluster, "ring").at(1).alpha_s > 0.1 * ring
    assert 0 < cost_of(cluster, "hierarchical").seconds(N) < math.inf
    assert cost_of(cluster, "halving_doubling").at(1).alpha_s < 1e-2


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(InvalidArgument, match="expected one of"):
        collective_rounds("all_reduce", "star", Placement(2, 1), N)


def test_a_torus_without_room_is_refused():
    with pytest.raises(InvalidArgument, match="room for 6"):
        hosts_of_one(7, Torus((2, 3)))
