"""Patience: at once when it is time, not for ever, and asleep in between."""

from __future__ import annotations

import time

from mpisgd.comm.waiting import Patience


def test_what_is_ready_is_not_waited_for():
    assert Patience(0.0).wait_for(lambda: True)


def test_what_never_comes_is_given_up_at_the_limit():
    patience = Patience(0.1)
    assert not patience.wait_for(lambda: False)
    assert 0.1 <= patience.waited_s < 1.0


def test_it_asks_until_the_answer_is_yes():
    answers = iter([False] * 50 + [True])
    assert Patience(5.0).wait_for(lambda: next(answers))


def test_a_second_wait_shares_the_limit():
    patience = Patience(0.1)
    time.sleep(0.12)
    assert not patience.wait_for(lambda: False)
    assert patience.wait_for(lambda: True)


def test_a_long_wait_costs_little_cpu():
    before = time.process_time()
    Patience(0.5).wait_for(lambda: False)
    assert time.process_time() - before < 0.1


def test_pauses_grow_with_the_wait():
    patience = Patience(100.0)
    short = patience._pause()
    patience.started -= 10
    assert short < patience._pause() <= 0.005
