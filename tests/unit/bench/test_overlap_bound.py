"""The bound of a step between hosts, and the search for a batch, as data."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.tools.bench.overlap import MarkedTraining, earliest_end, find_batch
from mpisgd.tools.bench.training import StepTask


def test_a_fast_link_ends_with_the_last_gradient():
    assert earliest_end([(1.0, 10), (2.0, 20), (3.0, 30)], 1000.0) == pytest.approx(3.03)


def test_a_slow_link_begins_with_the_first_gradient_and_never_rests():
    assert earliest_end([(1.0, 10), (2.0, 20), (3.0, 30)], 10.0) == pytest.approx(1.0 + 6.0)


def test_a_large_gradient_in_the_middle_decides():
    assert earliest_end([(1.0, 1), (5.0, 40), (5.5, 2)], 10.0) == pytest.approx(5.0 + 4.2)


@given(
    gradients=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 1000)), min_size=1, max_size=8).map(sorted),
    rate=st.floats(1, 1000),
)
def test_the_bound_is_the_worst_of_waiting_for_each_gradient_and_passing_what_is_left(gradients, rate):
    left = [sum(nbytes for _, nbytes in gradients[k:]) for k in range(len(gradients))]
    worst = max(ready + rest / rate for (ready, _), rest in zip(gradients, left, strict=True))
    assert earliest_end(gradients, rate) == pytest.approx(worst)


@pytest.mark.parametrize("wanted", [2.0, 3.5, 10.0, 100.0])
def test_the_batch_found_takes_as_long_as_asked_for(wanted):
    found = find_batch(lambda batch: 1.0 + 0.25 * batch, wanted)
    assert found == pytest.approx((wanted - 1.0) / 0.25, abs=1)


def test_where_one_example_takes_too_long_the_batch_is_one():
    assert find_batch(lambda batch: 5.0 * batch, 0.1) == 1


def test_the_search_ends_where_no_batch_is_large_enough():
    assert find_batch(lambda batch: 1e-9 * batch, 100.0) == 4096


def test_every_gradient_is_noted_once_in_a_step_while_the_step_goes_on():
    training = MarkedTraining(StepTask("mlp", 4, 1, small=True, communicates=False), 0)
    for _ in range(2):
        training.step()
    assert len(training.gradients) == len(training.optimizer_s) == 2
    for gradients in training.gradients:
        assert sorted(nbytes for _, nbytes in gradients) == sorted(
            param.nbytes for param in training.model.parameters()
        )
        times = [ready for ready, _ in gradients]
        assert times == sorted(times)
        assert times[0] > 0
    # The output layer's gradients are ready first, those of the first layer last.
    last = list(training.model.parameters())[-1].nbytes
    assert last in [nbytes for _, nbytes in training.gradients[0][:2]]
    slow, fast = training.earliest_ends(1e3), training.earliest_ends(1e12)
    total = sum(param.nbytes for param in training.model.parameters())
    assert all(a - b > 0.9 * total / 1e3 for a, b in zip(slow, fast, strict=True))


def test_marks_change_nothing():
    marked = MarkedTraining(StepTask("mlp", 4, 1, small=True), 0)
    marked.reset()
    marked.step()
    marked.verify()
    assert all(torch.isfinite(param).all() for param in marked.model.parameters())
