"""Choosing by prediction, and carrying what was measured over to other ranks."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.tuning import CostModel, Curve, LineSegment, MeasuredCurves
from mpisgd.tuning.model import kind, link_share, num_steps

KINDS = ("one host", "one rank per host", "several ranks per host")
ALGORITHMS = ("mpi", "node", "hierarchical", "ring", "halving_doubling", "all_to_all")
SHAPES = st.lists(st.integers(1, 8), min_size=1, max_size=6).filter(lambda ranks: sum(ranks) > 1)


def straight(alpha_s: float, beta_s_per_byte: float) -> tuple[LineSegment]:
    return (LineSegment(math.inf, alpha_s, beta_s_per_byte),)


NODE = MeasuredCurves(
    (2,),
    (
        Curve("mpi", False, straight(1e-6, 4e-10)),
        Curve("node", False, straight(10e-6, 1e-10)),  # meets mpi at 30,000 bytes
        Curve("mpi", True, straight(2e-6, 9e-10)),
        Curve("node", True, straight(10e-6, 1e-10)),  # at 10,000
    ),
)
HOSTS = MeasuredCurves(
    (2, 2),
    (
        Curve("mpi", False, straight(100e-6, 20e-9)),
        Curve("ring", False, straight(300e-6, 12e-9)),
        Curve("hierarchical", False, straight(150e-6, 10e-9), num_leaders=1),
        Curve("hierarchical", False, straight(250e-6, 8e-9), num_leaders=2),  # from 50,000 bytes on
    ),
)
MODEL = CostModel("test", (NODE, HOSTS), (2,))


@pytest.mark.parametrize(
    ("nbytes", "half", "wanted"),
    [(4, False, "mpi"), (15_000, False, "mpi"), (90_000, False, "node"), (30_000, True, "node")],
)
def test_what_is_clearly_faster_wins(nbytes, half, wanted):
    assert MODEL.choose(("node", "mpi"), nbytes, half) == wanted
    assert MODEL.choose(("mpi", "node"), nbytes, half) == wanted


def test_the_first_of_nearly_equals_wins_and_what_nobody_has_measured_comes_last():
    for nbytes in (29_000, 30_000, 31_000):  # they cross at 30,000
        assert MODEL.choose(("node", "mpi"), nbytes) == "node"
        assert MODEL.choose(("mpi", "node"), nbytes) == "mpi"
    assert MODEL.choose(("ring", "node"), 4) == "node"
    assert MODEL.choose(("ring", "all_to_all"), 4) == "ring"
    assert MODEL.seconds("ring", 4) == math.inf


def test_only_candidates_are_chosen():
    assert MODEL.choose(("mpi",), 2**30) == "mpi"


def test_hierarchical_is_as_fast_as_its_best_number_of_leaders():
    hosts = MODEL.at([2, 2])
    assert [hosts.num_leaders(nbytes) for nbytes in (4, 49_000, 51_000, 2**30)] == [1, 1, 2, 2]
    for nbytes in (4, 2**30):
        predicted = [curve.seconds(nbytes) for curve in HOSTS.curves[2:]]
        assert hosts.seconds("hierarchical", nbytes) == min(predicted)
    assert MODEL.num_leaders(4) == 1  # nothing like it on one host


def test_a_model_says_what_was_measured_for_the_ranks_it_was_measured_on():
    for measured in (NODE, HOSTS):
        here = MODEL.at(measured.ranks_per_host)
        for curve in measured.curves:
            if curve.algorithm != "hierarchical":
                for nbytes in (4, 2**20):
                    wanted = curve.seconds(nbytes)
                    assert here.seconds(curve.algorithm, nbytes, curve.half) == pytest.approx(wanted)


def test_more_hosts_take_more_steps_and_carry_more():
    """From 2 to 4 hosts: a step more, and 2 * 3/4 instead of 2 * 1/2 of the tensor over each link."""
    assert MODEL.at([2] * 4).seconds("mpi", 0) == pytest.approx(2 * 100e-6)
    grown = MODEL.at([2] * 4).seconds("mpi", 2**30) - MODEL.at([2] * 4).seconds("mpi", 0)
    assert grown == pytest.approx(1.5 * 20e-9 * 2**30)


def test_as_many_speakers_as_the_smallest_host_has_ranks():
    assert MODEL.at([8, 6]).num_leaders(2**30) == 6
    assert MODEL.at([2, 1]).num_leaders(2**30) == 1


def test_what_is_missing_comes_from_another_model():
    other = CostModel("other", (MeasuredCurves((4,), NODE.curves), MeasuredCurves((1, 1), HOSTS.curves)))
    joined = CostModel("mine", (NODE,)).completed(other)
    assert joined.source == "mine"
    assert [measured.ranks_per_host for measured in joined.measured] == [(2,), (1, 1)]


def test_one_rank_needs_no_time():
    assert MODEL.at([1]).choose(("mpi", "node"), 2**20) == "mpi"
    assert MODEL.at([1]).seconds("mpi", 2**20) == 0.0


def test_it_travels_between_processes():
    MODEL.choose(("mpi", "node"), 4)  # what it has computed for itself must not matter
    assert pickle.loads(pickle.dumps(MODEL)) == MODEL


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [([4], "one host"), ([1, 1, 1], "one rank per host"), ([2, 1], "several ranks per host")],
)
def test_kinds(ranks, wanted):
    assert kind(ranks) == wanted
    assert wanted in KINDS


@pytest.mark.parametrize(
    ("algorithm", "ranks", "share", "steps"),
    [
        ("mpi", [2], 1.0, 1),
        ("node", [4], 1.5, 2),
        ("mpi", [2, 2], 1.0, 1),
        ("hierarchical", [4, 4, 4], 4 / 3, 2),
        ("ring", [2, 2], 1.5, 6),
        ("halving_doubling", [2, 2], 2.0, 4),
        ("all_to_all", [2, 2], 2.0, 6),
        ("all_to_all", [1, 1], 1.0, 2),
        ("halving_doubling", [1, 1, 1], 2.0, 4),  # the third sends everything, and gets everything
        ("halving_doubling", [2, 1], 1.0, 4),
    ],
)
def test_what_a_link_carries_and_how_many_steps_there_are(algorithm, ranks, share, steps):
    assert link_share(algorithm, ranks) == pytest.approx(share)
    assert num_steps(algorithm, ranks) == steps


@given(SHAPES, st.sampled_from(ALGORITHMS))
def test_no_algorithm_is_below_the_bound_of_its_links(ranks, algorithm):
    """2 (h-1)/h of the tensor must leave each of h hosts; on one host ranks are what hosts are."""
    hosts = len(ranks) if len(ranks) > 1 else ranks[0]
    assert link_share(algorithm, ranks) >= 2 * (hosts - 1) / hosts - 1e-12
    assert num_steps(algorithm, ranks) >= math.ceil(math.log2(hosts))


def test_collectives_have_curves_of_their_own():
    quick, slow = straight(1e-6, 0.0), straight(2e-6, 0.0)
    curves = (
        Curve("mpi", False, slow),
        Curve("node", False, quick),
        Curve("mpi", False, quick, collective="broadcast"),
        Curve("node", False, slow, collective="broadcast"),
    )
    model = CostModel("test", (MeasuredCurves((2,), curves),)).at([2])
    assert model.choose(("mpi", "node"), 4) == "node"
    assert model.choose(("node", "mpi"), 4, collective="broadcast") == "mpi"
    assert model.choose(("node", "mpi"), 4, collective="all_gather") == "node"
    assert model.collectives == {"all_reduce", "broadcast"}


def test_a_model_can_leave_no_choice():
    model = MODEL.at([2]).only("mpi", "all_gather")
    assert model.choose(("node", "mpi"), 2**30, collective="all_gather") == "mpi"
    assert model.collectives == {"all_gather"}
