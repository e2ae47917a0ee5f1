"""Question and answer on a host: who asks is answered by its stamp; who has told what is known to all."""

from __future__ import annotations

import mmap
import threading

from mpisgd.monitor.shm_mailbox import ANSWER_BYTES, ASKED, SHARE_BYTES, VERDICT_BYTES, ShmMailbox
from mpisgd.transport.ipc.segment import Segment

PAGES = -(-SHARE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def boards(size: int) -> list[ShmMailbox]:
    segment = Segment(-1, PAGES, size)
    return [ShmMailbox(segment, rank, size) for rank in range(size)]


def test_an_answer_counts_for_what_was_asked_before_it():
    mine, other = boards(2)
    before = mine.ask([1])
    assert mine.answer_of(1, before) is None
    asked = other.asked()
    assert asked >= before
    other.answer(b"all is well", asked)
    assert mine.answer_of(1, before) == b"all is well"
    later = mine.ask([1])
    assert mine.answer_of(1, later) is None
    other.answer(b"not any more", other.asked())
    assert mine.answer_of(1, later) == b"not any more"


def test_of_two_that_ask_at_once_both_are_answered(monkeypatch):
    """The first has read the word ASKED before the second writes there, and writes over its stamp."""
    first, second, other = boards(3)
    now = iter([100, 105])
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic_ns", lambda: next(now))
        early, late = first.ask([2]), second.ask([2])
    first._words[first._word(2, ASKED)] = early
    assert other.asked() == early < late
    other.answer(b"all is well", other.stamp_of_answer())
    assert first.answer_of(2, early) == second.answer_of(2, late) == b"all is well"


def test_an_answer_that_is_half_written_is_not_taken():
    mine, other = boards(2)
    stamp = mine.ask([1])
    other.answer(b"x" * 100, stamp)
    other._bytes[other._room(1)] = ord("y")
    assert mine.answer_of(1, stamp) is None


def test_who_sleeps_is_woken_by_a_question():
    mine, other = boards(2)
    asked, woken = other.asked(), threading.Event()

    def sleep() -> None:
        while other.asked() == asked:
            other.sleep(asked, 20.0)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    mine.ask([1])
    assert woken.wait(5.0)
    thread.join()


def test_what_one_has_told_all_know_the_last_of_it_at_least():
    first, second = boards(2)
    for key in range(1, 101):
        first.note_told(key)
    assert second.is_told(100)
    assert second.is_told(50)
    assert not second.is_told(101)
    assert second.told() == []
    assert 100 in first.told()
    first.leave()
    assert second.has_left(0)
    assert not second.has_left(1)


def test_a_verdict_is_heard_once_and_only_as_a_whole():
    mine, other = boards(2)
    other.give_verdict(b"nothing can go on", [0])
    assert mine.new_verdicts() == [b"nothing can go on"]
    assert mine.new_verdicts() == []
    other.give_verdict(b"x" * 100, [0])
    place = other._room(1) + ANSWER_BYTES
    other._bytes[place] = ord("y")  # the next one is being written
    assert mine.new_verdicts() == []
    other._bytes[place] = ord("x")
    assert mine.new_verdicts() == [b"x" * 100]
    assert other.new_verdicts() == []


def test_a_verdict_that_is_too_long_leaves_the_others_memory_alone():
    mine, other = boards(2)
    mine.give_verdict(b"x" * (VERDICT_BYTES + 1), [1])
    assert other.new_verdicts() == []
    mine.give_verdict(b"x" * VERDICT_BYTES, [1])
    assert other.new_verdicts() == [b"x" * VERDICT_BYTES]
    assert not other.has_left(1)
