"""Turns, as data: everyone as often as the others, and an end."""

from hypothesis import given
from hypothesis import strategies as st

from mpisgd.bench.measure import Pace, calls_per_turn, goes_on, turns

PACE = Pace(rounds=10, min_rounds=3, budget_s=1.0, turn_s=0.01, max_calls=100)


@given(num=st.integers(1, 6), round_number=st.integers(0, 50))
def test_everyone_has_one_turn_in_a_round(num, round_number):
    assert sorted(turns(range(num), round_number)) == list(range(num))


def test_everyone_is_first_equally_often():
    firsts = [turns("abc", number)[0] for number in range(9)]
    assert {name: firsts.count(name) for name in "abc"} == {"a": 3, "b": 3, "c": 3}


def test_nobody_left_is_no_turn():
    assert turns([], 3) == []


@given(seconds=st.floats(0, 10))
def test_a_turn_has_at_least_one_call_and_an_upper_end(seconds):
    assert 1 <= calls_per_turn(seconds, PACE) <= PACE.max_calls


def test_a_turn_is_as_long_as_asked_for():
    assert calls_per_turn(0.001, PACE) == 10
    assert calls_per_turn(0.5, PACE) == 1


def test_the_budget_ends_it_but_not_before_the_least_number_of_rounds():
    assert goes_on(2, 100.0, PACE)
    assert not goes_on(3, 100.0, PACE)
    assert goes_on(9, 0.1, PACE)
    assert not goes_on(10, 0.1, PACE)


def test_fewer_rounds_than_the_least_are_taken_at_their_word():
    assert not goes_on(1, 0.0, Pace(1, 3, 1.0, 0.01, 100))
