"""What a process tells of its threads: whether one of them may go on to communicate."""

from __future__ import annotations

import threading

import pytest

from mpisgd.core import wait_registry
from mpisgd.monitor.rank_snapshot import look


def is_free_beside(action) -> tuple[bool, int]:
    """Whether this process counts as free while a thread sleeps that has done something; its number."""
    ready, over = threading.Event(), threading.Event()

    def run() -> None:
        action()
        ready.set()
        over.wait(20.0)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(20.0)
    found = look(0, "here", [], stacks=False).is_free
    over.set()
    thread.join()
    return found, thread.ident or 0


def test_a_thread_that_has_communicated_may_do_so_again():
    assert is_free_beside(wait_registry.communicates)[0]
    assert not is_free_beside(lambda: None)[0]


def test_a_thread_is_not_taken_for_one_that_had_its_number():
    """The system gives the number of a thread that has ended to the next one, as a rule."""
    numbers = set()
    for _ in range(20):
        free, number = is_free_beside(wait_registry.communicates)
        assert free
        numbers.add(number)
        free, number = is_free_beside(lambda: None)
        assert not free
        if number in numbers:
            return
    pytest.fail("no number was given out again, so nothing was tested")
