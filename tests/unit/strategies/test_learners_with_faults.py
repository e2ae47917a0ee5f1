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
        killed = {fault.learner: fault.at_s for fault in faults if not fault.stop_s}
        assert len(killed) == 5
        assert 0 not in {fault.learner for fault in faults}
        for fault in faults:
            assert fault.at_s + fault.stop_s <= killed.get(fault.learner, case.seconds)


def test_a_row_is_of_all_seeds_of_a_case():
    case = case_of("4x6:10:20", Case())
    found = [
        Comparison(case._replace(seed=seed), 0.9 + seed / 100, 1 + seed / 100, 0.5, 0.25) for seed in range(3)
    ]
    (row,) = rows(found)
    assert row == ["4 x 6", "10", "20", "3", "0.910", "0.900", "1.010", "1.020", "0.50", "0.5", "25%"]
