"""What `tune` measures, when it drops an algorithm, and how it says what it found."""

from __future__ import annotations

import math

import pytest

from mpisgd.collectives.all_reduce import CHOICES
from mpisgd.collectives.dispatch import TUNED
from mpisgd.tools.bench.report.tuning import cost_table, crossovers, doubts, one_line
from mpisgd.tools.bench.tune import SETTLED_BYTES, TransportChoice, contenders, to_measure
from mpisgd.tuning import CostModel, Curve, LineSegment, MeasuredCurves

FAST, SLOW, OTHER = Curve("node", False), Curve("ring", False), Curve("mpi", True)


SHARED = TransportChoice("node", False, tuple(TUNED))
DIRECT = TransportChoice("direct", False, ())
HIERARCHICAL = TransportChoice("hierarchical", True, tuple(TUNED))


def names(ranks, transports, half):
    found = to_measure(ranks, transports)
    return {(way.algorithm, way.num_leaders) for way in found if way.purpose == ("all_reduce", half)}


@pytest.mark.parametrize("half", [False, True])
def test_every_algorithm_that_may_win_is_measured(half):
    hosts = {("mpi", 1), ("all_to_all", 1), ("ring", 1), ("halving_doubling", 1)}
    alone = {("node", 1), ("mpi", 1), ("all_to_all", 1)}
    assert names([4], [SHARED], half) == alone
    assert names([4], [SHARED, DIRECT], half) == alone | {("direct", 1)}
    assert names([4], [], half) == {("mpi", 1), ("all_to_all", 1)}
    assert names([4, 3], [HIERARCHICAL], half) == hosts | {("hierarchical", 1), ("hierarchical", 3)}
    assert names([1, 1], [HIERARCHICAL], half) == hosts | {("hierarchical", 1)}
    assert names([2, 2], [], half) == hosts


def test_on_one_host_other_collectives_are_measured_too():
    for collective in TUNED:
        found = [w for w in to_measure([3], [SHARED, DIRECT]) if w.collective == collective]
        assert {(w.algorithm, w.half) for w in found} == {("node", False), ("mpi", False)}, collective
    for ranks, transports in ([3], []), ([2, 2], [HIERARCHICAL]):
        assert {way.collective for way in to_measure(ranks, transports)} == {"all_reduce"}


def test_a_transport_that_nobody_has_named_here_is_measured():
    ours = TransportChoice("of mine", False, ("broadcast",))
    found = to_measure([2], [ours, SHARED])
    assert Curve("of mine", False) in found
    assert Curve("of mine", False, collective="broadcast") in found
    assert Curve("node", False, collective="all_gather") in found


def test_what_is_measured_is_what_all_reduce_has():
    found = to_measure([2], [SHARED]) + to_measure([2, 2], [HIERARCHICAL])
    assert {way.algorithm for way in found} <= set(CHOICES)


@pytest.mark.parametrize(
    ("before_s", "now_s", "stays"),
    [(3.0, 3.0, False), (1.5, 3.0, True), (3.0, 1.5, True), (1.5, 1.5, True), (2.0, 2.0, False)],
)
def test_who_was_hopeless_twice_is_out(before_s, now_s, stays):
    nbytes = 2 * SETTLED_BYTES
    best = {
        FAST: {SETTLED_BYTES: 1.0, nbytes: 1.0},
        SLOW: {SETTLED_BYTES: before_s, nbytes: now_s},
        OTHER: {SETTLED_BYTES: 100.0, nbytes: 100.0},  # of another kind: nobody to compare with
    }
    left = contenders([FAST, SLOW, OTHER], best, nbytes)
    assert left == ([FAST, SLOW, OTHER] if stays else [FAST, OTHER])


def test_small_messages_put_nobody_out():
    best = {FAST: {}, SLOW: {}}
    for nbytes in (SETTLED_BYTES // 2, SETTLED_BYTES):
        best[FAST][nbytes], best[SLOW][nbytes] = 1.0, 100.0
        assert contenders([FAST, SLOW], best, nbytes) == [FAST, SLOW]


def straight(alpha_s, beta_s_per_byte):
    return (LineSegment(math.inf, alpha_s, beta_s_per_byte),)


def points(segments, factor=1.0):
    line = Curve("mpi", False, segments)
    return tuple((4.0**i, line.seconds(4.0**i) * (factor if i % 2 else 1.0)) for i in range(4, 13))


NODE, MPI = straight(10e-6, 1e-10), straight(1e-6, 4e-10)  # they meet at 30,000 bytes
MEASURED = MeasuredCurves(
    (2,),
    (
        Curve("node", False, NODE, points=points(NODE)),
        Curve("mpi", False, MPI, points=points(MPI)),
        Curve("node", True, NODE, points=points(NODE)),
        Curve("mpi", False, MPI, points=points(MPI), collective="broadcast"),
    ),
)
HOSTS = MeasuredCurves(
    (2, 2),
    (
        Curve("hierarchical", False, NODE, 1, points(NODE)),
        Curve("hierarchical", False, MPI, 2, points(MPI)),
    ),
)
MODEL = CostModel("test", (MEASURED, HOSTS))


def test_crossovers_are_said_in_round_sizes():
    assert list(crossovers(MODEL, MEASURED)) == [
        "2 ranks on one host, all_reduce: mpi, node from 32 KiB on",
        "2 ranks on one host, all_reduce of half precision: node",
        "2 ranks on one host, broadcast: mpi",
    ]


def test_leaders_are_part_of_what_is_chosen():
    (said,) = crossovers(MODEL, HOSTS)
    assert said == "2+2 ranks on 2 hosts, all_reduce: hierarchical (2 leaders), hierarchical from 32 KiB on"


def test_the_table_has_a_row_for_each_segment():
    table = cost_table(MEASURED)
    assert table.title == "2 ranks on one host"
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["algorithm"] == ["node", "mpi", "node", "mpi"]
    assert columns["latency"] == ["10.0 us", "1.00 us", "10.0 us", "1.00 us"]
    assert columns["GB/s"] == ["10", "2.5", "10", "2.5"]
    assert columns["R²"] == ["1.000"] * 4
    assert columns["collective"] == ["all_reduce", "all_reduce", "all_reduce of half precision", "broadcast"]


def test_poor_fits_are_owned_up_to():
    assert list(doubts([MEASURED, HOSTS])) == []
    poor = MeasuredCurves(
        (2,), (*MEASURED.curves, Curve("ring", False, MPI, points=points(MPI, factor=20.0)))
    )
    (said,) = doubts([poor])
    assert said.startswith("1 of 5 fits are poor")


def test_a_size_is_one_line():
    assert one_line([2], 4096, {FAST: 1e-5, OTHER: 2e-3}) == (
        "2 ranks on one host, 4 KiB: all_reduce node 10.0 us, all_reduce of half precision mpi 2.00 ms"
    )
