"""What a process tells of its groups and threads: whether one of them may go on to communicate."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from mpisgd.core import wait_registry
from mpisgd.core.wait_registry import WaitReason, waiting_for
from mpisgd.errors import NotInitialized
from mpisgd.monitor.rank_snapshot import take_snapshot


def may_communicate_beside(action) -> tuple[bool, int]:
    """Whether this process counts as free while a thread sleeps that has done something; its number."""
    ready, over = threading.Event(), threading.Event()

    def run() -> None:
        action()
        ready.set()
        over.wait(20.0)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(20.0)
    found = take_snapshot(0, "here", [], stacks=False).may_communicate
    over.set()
    thread.join()
    return found, thread.ident or 0


def test_a_thread_that_has_communicated_may_do_so_again():
    assert may_communicate_beside(wait_registry.mark_communicating)[0]
    assert not may_communicate_beside(lambda: None)[0]


def test_a_thread_is_not_taken_for_one_that_had_its_number():
    """The system gives the number of a thread that has ended to the next one, as a rule."""
    numbers = set()
    for _ in range(20):
        free, number = may_communicate_beside(wait_registry.mark_communicating)
        assert free
        numbers.add(number)
        free, number = may_communicate_beside(lambda: None)
        assert not free
        if number in numbers:
            return
    pytest.fail("no number was given out again, so nothing was tested")


class ClosedGroup:
    """A group that another thread has closed since it was listed."""

    name, ranks, ordinal = "mine", (0, 1), 0

    @property
    def queue(self) -> object:
        raise NotInitialized("group 'mine' was closed by mpisgd.shutdown()")


def test_a_group_that_is_closed_meanwhile_is_left_out():
    """It once ended the monitor's thread, and with it all stall reports and timeouts inside MPI."""
    consistency = SimpleNamespace(number=5)
    messages = SimpleNamespace(in_flight=list, num_ended=2)
    queue = SimpleNamespace(consistency=consistency, running=None)
    group = SimpleNamespace(name="world", ranks=(0, 1), ordinal=0, queue=queue, point_to_point=messages)
    state = take_snapshot(0, "here", [ClosedGroup(), group], stacks=False)
    assert state.num_begun == {"[0,1] 0": 5}
    assert state.progress == 7


def test_a_wait_shows_the_line_of_the_program_and_its_stack_ends_there():
    with waiting_for(WaitReason("tea")):
        time.sleep(0.001)
        state = take_snapshot(0, "here", [])
    (wait,) = state.waits
    assert wait.site.endswith("in test_a_wait_shows_the_line_of_the_program_and_its_stack_ends_there")
    *_, last = [line for line in state.stacks["MainThread"].splitlines() if line.startswith("  File")]
    assert last.endswith("in test_a_wait_shows_the_line_of_the_program_and_its_stack_ends_there")
