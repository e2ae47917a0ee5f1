"""Fitting: lines that are known come back from noisy points of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.tuning.curve import Curve, LineSegment, Point, fit

SIZES = [256.0 * 2**power for power in range(19)]  # to 64 MiB


def curve_of(segments: tuple[LineSegment, ...], points: Iterable[Point] = ()) -> Curve:
    return Curve("mpi", False, segments, points=tuple(points))


def fitted(points: list[Point], **options) -> Curve:
    return curve_of(fit(points, **options), points)


ONE = curve_of((LineSegment(math.inf, 10e-6, 1e-10),))
# A protocol that changes at 40 KiB, caches that end at 3 MiB.
THREE = curve_of(
    (
        LineSegment(40 * 2**10, 8e-6, 5e-10),
        LineSegment(3 * 2**20, 40e-6, 2e-10),
        LineSegment(math.inf, 0.0, 6e-10),
    )
)


def points_of(line: Curve, *, noise: float = 0.0, seed: int = 0) -> list[tuple[float, float]]:
    rng = random.Random(seed)
    return [(nbytes, line.seconds(nbytes) * (1 + rng.uniform(-noise, noise))) for nbytes in SIZES]


def test_a_line_takes_each_size_from_its_segment():
    assert THREE.seconds(0) == 8e-6
    assert THREE.seconds(40 * 2**10) == pytest.approx(8e-6 + 5e-10 * 40 * 2**10)
    assert THREE.seconds(40 * 2**10 + 1) == pytest.approx(40e-6 + 2e-10 * (40 * 2**10 + 1))
    assert THREE.seconds(2**40) == pytest.approx(6e-10 * 2**40)


def test_scaling_acts_on_latency_and_bandwidth_apart():
    assert THREE.scaled(3.0, 1.0, 1).seconds(0) == pytest.approx(24e-6)
    assert THREE.scaled(3.0, 1.0, 1).seconds(2**30) == THREE.seconds(2**30)  # its last segment has no latency
    assert THREE.scaled(1.0, 0.5, 1).seconds(2**30) == pytest.approx(THREE.seconds(2**30) / 2)


@pytest.mark.parametrize("line", [ONE, THREE], ids=["one", "three"])
def test_exact_points_give_the_line_back(line):
    found = fitted(points_of(line))
    assert len(found.segments) == len(line.segments)
    for mine, wanted in zip(found.segments, line.segments, strict=True):
        assert mine.alpha_s == pytest.approx(wanted.alpha_s, rel=1e-6, abs=1e-12)
        assert mine.beta_s_per_byte == pytest.approx(wanted.beta_s_per_byte, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("line", [ONE, THREE], ids=["one", "three"])
def test_noisy_points_give_the_line_back(line, seed):
    points = points_of(line, noise=0.05, seed=seed)
    found = fitted(points)
    assert len(found.segments) == len(line.segments)
    assert found.agreement() > 0.95
    for nbytes in SIZES:
        assert found.seconds(nbytes) == pytest.approx(line.seconds(nbytes), rel=0.12)


def test_agreement_sees_a_line_that_does_not_fit():
    assert curve_of(ONE.segments, points_of(ONE)).agreement() == 1.0
    three = points_of(THREE)
    assert fitted(three, max_segments=1).agreement() < fitted(three).agreement()
    assert curve_of(ONE.segments, points_of(THREE, noise=0.05)).agreement() < 0.95


def test_the_largest_size_alone_may_show_that_caches_have_ended():
    points = points_of(ONE)
    last_bytes, last_s = points[-1]
    found = fitted([*points[:-1], (last_bytes, 3 * last_s)])
    assert found.seconds(last_bytes) == pytest.approx(3 * last_s)
    assert found.seconds(4 * last_bytes) == pytest.approx(12 * last_s)
    assert found.seconds(points[-2][0]) == pytest.approx(points[-2][1])


def test_a_wobble_at_the_end_is_not_taken_for_bandwidth():
    """Two equal times at the end would predict that any size takes as long."""
    points = points_of(ONE)
    points[-1] = (points[-1][0], points[-2][1] * 1.01)
    assert fitted(points).seconds(16 * SIZES[-1]) > 8 * points[-1][1]


@pytest.mark.parametrize("points", [[(1024.0, 1e-5)], [(1024.0, 1e-5), (2048.0, 1e-5)]])
def test_few_points_give_a_line_too(points):
    found = fitted(points)
    assert found.seconds(4096) > 0
    assert found.segments[-1].up_to_bytes == math.inf


@given(st.dictionaries(st.integers(1, 2**34).map(float), st.floats(1e-7, 1e2), min_size=1, max_size=12))
def test_whatever_is_measured_every_size_has_a_sane_prediction(measured):
    found = fitted(list(measured.items()))
    assert 1 <= len(found.segments) <= 3
    ends = [segment.up_to_bytes for segment in found.segments]
    assert ends[-1] == math.inf
    assert all(end < after for end, after in pairwise(ends))
    for segment in found.segments:
        assert segment.alpha_s >= 0
        assert segment.beta_s_per_byte >= 0
    assert all(found.seconds(nbytes) > 0 for nbytes in measured)
    assert found.seconds(2**35) >= found.seconds(2**34) > 0
