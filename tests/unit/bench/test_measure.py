"""Turns, as data: everyone as often as the others, and an end."""

from hypothesis import given
from hypothesis import strategies as st

from mpisgd.tools.bench import measure as module
from mpisgd.tools.bench.cases import halvings
from mpisgd.tools.bench.measure import Pace, Timed, calls_per_turn, goes_on, measure, turns

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


def test_threads_are_halved_down_to_one():
    assert halvings(12) == [12, 6, 3, 1]
    assert halvings(1) == [1]


class Simulated(Timed):
    """Takes as long as it is told for each number of threads; a single call after another one takes longer.

    One of its turns with one thread is shorter than all others, as turns are at times.
    """

    def __init__(self, name, seconds):
        super().__init__(name, lambda: None, start=lambda: None)
        self.seconds, self.tried = seconds, []

    def time(self, calls):
        is_cold = calls == 1 and self.tried[-1:] != [self.num_threads]
        self.tried.append(self.num_threads)
        lucky = 0.9 * (self.num_threads == 1 and self.tried.count(1) == 2)
        return self.seconds[self.num_threads] * (1 - lucky) + self.num_threads * is_cold


def test_the_fastest_number_of_threads_is_found_before_the_rounds(monkeypatch):
    """By medians of turns that begin with a call that is not counted."""
    monkeypatch.setattr(module, "slowest", lambda seconds: seconds)
    monkeypatch.setattr(module, "first_reason", lambda reason: reason)
    chooses, has_none = Simulated("chooses", {4: 0.5, 2: 0.3, 1: 0.4}), Simulated("has none", {0: 0.1})
    chooses.threads = [4, 2, 1]
    found = measure([chooses, has_none], Pace(3, 3, 0.0, turn_s=9.0, max_calls=2))
    assert found.threads == {"chooses": 2}
    assert found.seconds["chooses"] == [0.3] * 3
    assert chooses.tried[:3] == [4, 2, 1]
    assert chooses.tried[-3:] == [2] * 3
    assert has_none.tried == [0] * 4
