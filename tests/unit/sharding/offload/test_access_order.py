"""What is expected next, after an order that repeats."""

from __future__ import annotations

from mpisgd.sharding.offload.block_cache import AccessOrder


def after(*indices):
    order = AccessOrder()
    for index in indices:
        order.note(index)
    return order


def test_nothing_is_expected_before_anything_was_seen():
    assert AccessOrder().expected(3) == []
    assert after(0, 1, 2).expected(3) == []


def test_a_cycle_goes_on_at_its_beginning():
    assert after(0, 1, 2, 3, 0).expected(2) == [1, 2]
    assert after(0, 1, 2, 3, 0, 1, 2).expected(3) == [3, 0, 1]


def test_forward_and_backward_are_told_apart():
    """After 1 comes 2 in forward, and 0 in backward."""
    step = (0, 1, 2, 2, 1, 0)
    assert after(*step, 0, 1).expected(2) == [2, 0]
    assert after(*step, 0, 1, 2).expected(2) == [1, 0]
    assert after(*step, 0, 1, 2, 2).expected(2) == [1, 0]


def test_each_is_named_once_and_the_present_one_never():
    assert after(0, 1, 0, 1, 0).expected(4) == [1]


def test_what_has_changed_is_learnt():
    order = after(0, 1, 2, 0, 2, 1, 0)
    assert order.expected(2) == [2, 1]
    order.forget()
    assert order.expected(2) == []
