"""Backoff: at once when it is time, not for ever, and asleep in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from mpisgd.errors import CollectiveTimeout, PeerLost
from mpisgd.threads import waiting
from mpisgd.threads.waiting import (
    LONG_SLEEP_S,
    SHORT_SLEEP_S,
    SHORT_SPIN_S,
    SPIN_S,
    YIELD_S,
    Backoff,
    add_pending_message,
    allow_waits,
    cancel_all,
    cancel_reason,
    cancelled_by_loss,
    is_oversubscribed,
    pause_s,
    remove_pending_message,
    set_oversubscribed,
)


def test_what_is_ready_is_not_waited_for():
    assert Backoff(0.0).wait_for(lambda: True)


def test_what_never_comes_is_given_up_at_the_limit():
    backoff = Backoff(0.1)
    assert not backoff.wait_for(lambda: False)
    assert 0.1 <= backoff.waited_s < 1.0


def test_it_asks_until_the_answer_is_yes():
    answers = iter([False] * 50 + [True])
    assert Backoff(5.0).wait_for(lambda: next(answers))


def test_a_second_wait_shares_the_limit():
    backoff = Backoff(0.1)
    time.sleep(0.12)
    assert not backoff.wait_for(lambda: False)
    assert backoff.wait_for(lambda: True)


def test_a_long_wait_costs_little_cpu():
    before = time.process_time()
    Backoff(0.5).wait_for(lambda: False)
    assert time.process_time() - before < 2 * SPIN_S  # it spins for so long where there is a core for each


def test_pauses_grow_with_the_wait():
    assert pause_s(0.0, SHORT_SLEEP_S) < pause_s(0.05, SHORT_SLEEP_S) <= 0.01
    assert pause_s(1000.0, SHORT_SLEEP_S) == LONG_SLEEP_S


def test_pauses_are_short_while_messages_are_under_way():
    usual = pause_s(0.2, 0.0)
    messages = [object(), object()]
    for message in messages:
        add_pending_message(message)
    for message in messages:
        assert pause_s(0.2, 0.0) <= usual / 20
        remove_pending_message(message)
    assert pause_s(0.2, 0.0) == usual


@pytest.fixture
def oversubscribed() -> Iterator[None]:
    before = is_oversubscribed()
    set_oversubscribed(True)
    yield
    set_oversubscribed(before)


@pytest.mark.usefixtures("oversubscribed")
@pytest.mark.parametrize("wakes", [True, False])
def test_where_cores_are_scarce_it_sleeps_if_a_rank_would_wake_it(wakes):
    slept: list[float] = []

    def sleep(limit_s: float) -> bool:
        slept.append(limit_s)
        return wakes

    backoff = Backoff(5.0)
    assert backoff.wait_for(lambda: len(slept) >= 5, sleep)
    assert backoff.waited_s >= YIELD_S  # before that it only yields its core
    assert all(0 < limit_s <= LONG_SLEEP_S for limit_s in slept)


@pytest.mark.usefixtures("oversubscribed")
def test_who_waits_for_messages_of_others_sleeps_sooner():
    slept: list[float] = []

    def sleep(limit_s: float) -> bool:
        slept.append(backoff.waited_s)
        return True

    backoff = Backoff(5.0)
    assert backoff.wait_for(lambda: len(slept) >= 2, sleep, yield_s=0.02)
    assert 0.02 <= slept[0] < slept[1]


@pytest.mark.usefixtures("oversubscribed")
def test_who_has_messages_in_flight_looks_after_them_more_often():
    slept: list[float] = []

    def sleep(limit_s: float) -> bool:
        slept.append(limit_s)
        return True

    message = object()
    assert Backoff(5.0).wait_for(lambda: len(slept) >= 1, sleep)
    waiting.add_pending_message(message)
    try:
        assert Backoff(5.0).wait_for(lambda: len(slept) >= 2, sleep)
    finally:
        waiting.remove_pending_message(message)
    assert slept[0] >= waiting.WAKEABLE_SLEEP_S > 2 * slept[1] > 0.0


@pytest.mark.usefixtures("oversubscribed")
def test_a_sleep_does_not_hide_the_time_limit():
    assert not Backoff(0.05).wait_for(lambda: False, lambda limit_s: True)


@pytest.mark.parametrize(
    ("first", "second", "loss"),
    [
        (CollectiveTimeout("late"), PeerLost("gone"), False),
        (PeerLost("gone"), CollectiveTimeout("late"), True),
    ],
)
def test_a_cancelled_wait_ends_with_the_first_reason_each_with_an_error_of_its_own(first, second, loss):
    cancel_all(first)
    cancel_all(second)
    try:
        assert cancelled_by_loss() == loss
        caught = []
        for _ in range(2):
            with pytest.raises(type(first), match=first.args[0]) as raised:
                Backoff(5.0).wait_for(lambda: False)
            caught.append(raised.value)
        assert caught[0] is not caught[1]
        assert Backoff(5.0).wait_for(lambda: True)  # what is there already needs no wait
    finally:
        allow_waits()
    assert cancel_reason() is None
    assert not cancelled_by_loss()
    assert not Backoff(0.01).wait_for(lambda: False)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_rank_that_has_a_core_does_not_sleep_through_a_short_wait(monkeypatch, pauses, in_background):
    """Who sleeps computes slower afterwards. In the background the main thread wants the interpreter."""
    monkeypatch.setattr(waiting, "_oversubscribed", False)
    answers = [False] * 100 + [True]

    def wait():
        backoff = Backoff(5.0)
        backoff.started -= SHORT_SPIN_S  # as if it had taken so long already
        assert backoff.wait_for(iter(answers).__next__)

    thread = threading.Thread(target=wait)
    (thread.start if in_background else wait)()
    if in_background:
        thread.join()
    assert bool(pauses) is in_background
