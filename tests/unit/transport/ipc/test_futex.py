"""`Futex`: asleep until the word is written and the sleeper woken, or the timeout; never without need."""

from __future__ import annotations

import threading
import time

import pytest

from mpisgd.transport.ipc.futex import Futex
from mpisgd.transport.ipc.segment import Segment, open_segment

LONG_S = 30.0


class Alone:
    """The communicator of a single rank."""

    rank, size = 0, 1

    def broadcast_object(self, obj: object, root: int) -> object:
        return obj

    def all_gather_object(self, obj: object) -> list[object]:
        return [obj]


@pytest.fixture
def segment() -> Segment:
    made = open_segment(Alone(), 4096)  # type: ignore[arg-type]
    if made is None or not Futex(made.memory).available:
        pytest.skip("this system has no futex or no memfd")
    return made


def test_a_sleeper_wakes_when_the_word_changes_and_it_is_woken(segment):
    words, woken = memoryview(segment.memory).cast("Q"), threading.Event()

    def sleeper() -> None:
        while words[5] == 0:
            Futex(segment.memory).wait(5, 0, LONG_S)
        woken.set()

    thread = threading.Thread(target=sleeper)
    thread.start()
    time.sleep(0.05)
    assert not woken.is_set()
    words[5] = 1
    Futex(segment.memory).wake(5)
    thread.join(LONG_S / 2)
    assert woken.is_set()


@pytest.mark.parametrize("value", [7, 2**32 + 7])
def test_nobody_sleeps_on_a_word_that_has_changed_already(segment, value):
    memoryview(segment.memory).cast("Q")[3] = value
    started = time.monotonic()
    Futex(segment.memory).wait(3, value - 1, LONG_S)
    assert time.monotonic() - started < LONG_S / 2


def test_the_time_limit_ends_a_sleep(segment):
    started = time.monotonic()
    Futex(segment.memory).wait(2, 0, 0.05)
    assert 0.04 < time.monotonic() - started < LONG_S / 2
