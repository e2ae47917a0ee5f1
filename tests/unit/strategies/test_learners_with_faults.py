"""Stops and losses of learners, in simulated time: the others hardly wait, and lose no steps."""

from __future__ import annotations

import pytest
from learners.main import Comparison, case_of, rows, simulated, summed
from learners.training import Case, drawn

CASE = Case(hosts=4, stops=3, kills=1, seconds=40.0, sync_every=25, step_s=0.08)


@pytest.mark.parametrize("seed", range(2))
def test_a_training_with_stops_and_a_loss_is_about_as_fast_as_one_without(seed):
    case = CASE._replace(seed=seed)
    disturbed = summed(simulated(case))
    undisturbed = summed(simulated(case._replace(stops=0, kills=0)))
    assert undisturbed.without_some == 0
    assert disturbed.without_some > 0
    assert disturbed.rate / undisturbed.rate > 0.93  # of a stop in 13 seconds
    assert disturbed.longest_s < case.grace_s + 2 * case.step_s


def test_stops_are_of_learners_that_are_there():
    for seed in range(20):
        case = CASE._replace(learners=3, stops=6, kills=5, seed=seed)
        faults = drawn(case)
        killed = {fault.rank: fault.at_s for fault in faults if not fault.stop_s}
        assert len(killed) == 5
        assert 0 not in {fault.rank for fault in faults}
        for fault in faults:
            assert fault.at_s + fault.stop_s <= killed.get(fault.rank, case.seconds)


def test_a_row_is_of_all_seeds_of_a_case():
    case = case_of("4x6:10:20", Case())
    found = [
        Comparison(case._replace(seed=seed), 0.9 + seed / 100, 1 + seed / 100, 0.5, 0.25) for seed in range(3)
    ]
    (row,) = rows(found)
    assert row == ["4 x 6", "10", "20", "3", "0.910", "0.900", "1.010", "1.020", "0.50", "0.5", "25%"]


def test_hosts_that_are_learners_go_on_without_one_that_has_lost_a_rank():
    case = CASE._replace(hosts=3, learners=2, together=True, stops=0, seconds=16.0, quorum=1)
    seen = simulated(case)
    assert len(seen) == case.size  # the rank that is left of the learner has told, too
    (killed,) = drawn(case)
    ended = {one.rank for one in seen if one.there_s < case.seconds}
    assert ended == {killed.rank // 2 * 2, killed.rank // 2 * 2 + 1}
    disturbed, undisturbed = summed(seen), summed(simulated(case._replace(kills=0)))
    assert undisturbed.without_some == 0
    assert disturbed.without_some > 0
    assert disturbed.rate / undisturbed.rate > 0.93
    assert disturbed.longest_s < case.grace_s + 2 * case.step_s


def test_faults_of_hosts_that_are_learners_are_of_different_ones():
    for seed in range(20):
        case = CASE._replace(learners=3, together=True, stops=6, kills=3, seed=seed)
        faults = drawn(case)
        assert {fault.rank // 3 for fault in faults if not fault.stop_s} == {1, 2, 3}
        assert min(fault.rank for fault in faults) >= 3
