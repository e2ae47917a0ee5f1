"""Intervals of checkpoints, and expected maxima, against simulations of what they are the means of."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpisgd.tools.plan.cluster import Failures
from mpisgd.tools.plan.failures import (
    daly_interval,
    elastic_share,
    expected_maximum,
    interruptions,
    straggler_factor,
    work_share,
    young_interval,
)

MTBF, CHECKPOINT, RESTART = 3600.0, 60.0, 120.0


def test_youngs_interval():
    assert young_interval(60.0, 3600.0) == pytest.approx(math.sqrt(2 * 60 * 3600))


def test_dalys_interval_is_near_the_best_of_his_model():
    intervals = np.linspace(100, 2000, 1901)
    best = intervals[np.argmax([work_share(each, CHECKPOINT, MTBF, RESTART) for each in intervals])]
    assert daly_interval(CHECKPOINT, MTBF) == pytest.approx(best, rel=0.01)
    assert abs(young_interval(CHECKPOINT, MTBF) - best) > abs(daly_interval(CHECKPOINT, MTBF) - best)


def test_a_checkpoint_that_takes_longer_than_failures_need():
    assert daly_interval(100.0, 50.0) == 50.0


def simulated_share(interval_s, rng, wanted=3_000_000.0):
    """Work until enough is saved; failures come at exponential times, in work, checkpoints and restarts."""
    now, saved, failure = 0.0, 0.0, rng.exponential(MTBF)
    while saved < wanted:
        end = now + interval_s + CHECKPOINT
        if failure >= end:
            now, saved = end, saved + interval_s
            continue
        while failure < (up := failure + RESTART) and (again := failure + rng.exponential(MTBF)) < up:
            failure = again
        now, failure = up, max(up, again)
    return saved / now


def test_the_share_of_work_is_what_a_simulation_finds():
    rng = np.random.default_rng(1)
    for interval in (300.0, 600.0, 1500.0):
        expected = work_share(interval, CHECKPOINT, MTBF, RESTART)
        assert simulated_share(interval, rng) == pytest.approx(expected, rel=0.02)


def test_elastic_training_keeps_more_where_failures_are_frequent():
    found = interruptions(Failures(mtbf_hours=1000, checkpoint_s=60, restart_s=300), 500)
    assert found.mtbf_s == 7200
    assert found.elastic_share > found.restart_share > 0.5


def test_elastic_training_needs_somebody_who_is_left():
    assert elastic_share(Failures(mtbf_hours=100), 1) == 0


def test_expected_maxima_are_those_of_random_numbers():
    rng = np.random.default_rng(2)
    for size in (2, 4, 64):
        drawn = rng.standard_normal((40_000, size)).max(axis=1).mean()
        assert expected_maximum(size) == pytest.approx(drawn, abs=0.02)
    assert expected_maximum(1) == pytest.approx(0.0, abs=1e-9)
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-6)


def test_ranks_that_meet_seldom_average_over_their_own_steps():
    assert straggler_factor(0.1, 8, 4) - 1 == pytest.approx((straggler_factor(0.1, 8) - 1) / 2)
    assert straggler_factor(0.1, 1) == straggler_factor(0.0, 8) == 1.0


def test_restarts_cost_even_where_a_checkpoint_takes_no_time():
    found = interruptions(Failures(mtbf_hours=100.0, checkpoint_s=0.0, restart_s=600.0), 100)
    assert found.daly_s == 0.0
    assert found.restart_share == pytest.approx(math.exp(-600 / 3600))
    short = interruptions(Failures(mtbf_hours=100.0, checkpoint_s=1e-6, restart_s=600.0), 100)
    assert found.restart_share == pytest.approx(short.restart_share, rel=1e-4)
