"""What a process tells of its groups and threads: whether one of them may go on to communicate."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from mpisgd.errors import NotInitialized
from mpisgd.monitor.rank_snapshot import stack_of, take_snapshot
from mpisgd.monitor.rank_state import group_key
from mpisgd.threads import wait_registry
from mpisgd.threads.wait_registry import WaitReason, waiting_for
from mpisgd.threads.waiting import Backoff


def is_free_beside(sleeping, wake, **options) -> tuple[bool, int]:
    """Whether this process counts as free while a thread is in `sleeping`; the thread's number."""
    thread = threading.Thread(target=sleeping, daemon=True, **options)
    thread.start()
    time.sleep(0.03)
    found = take_snapshot(0, "here", [], stacks=False).may_communicate
    wake()
    thread.join(20.0)
    assert not thread.is_alive()
    return found, thread.ident or 0


def may_communicate_beside(action) -> tuple[bool, int]:
    """The same while a thread sleeps that has done something."""
    over = threading.Event()

    def run() -> None:
        action()
        over.wait()

    return is_free_beside(run, over.set)


def test_a_thread_that_has_communicated_may_do_so_again():
    assert may_communicate_beside(wait_registry.mark_communicating)[0]
    assert not may_communicate_beside(lambda: None)[0]


@contextlib.contextmanager
def threads_that_wait_for_no_other():
    """Functions that block for reasons of their own, by name, with what ends them."""
    ours, theirs = socket.socketpair()
    inbox: multiprocessing.SimpleQueue = multiprocessing.SimpleQueue()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    event, items = threading.Event(), queue.Queue()
    timer = threading.Timer(60.0, print)
    with ours, theirs:
        yield {
            "a socket": (lambda: ours.recv(1), lambda: theirs.send(b"x")),
            "a subprocess": (child.wait, lambda: child.communicate(b"\n")),
            "a queue of multiprocessing": (inbox.get, lambda: inbox.put(1)),
            "selectors": (lambda: select.select([ours], [], [], 60.0), lambda: theirs.send(b"x")),
            "an event, with a limit": (lambda: event.wait(60.0), event.set),
            "a queue, with a limit": (lambda: items.get(timeout=60.0), lambda: items.put(1)),
            "a timer": (timer.run, timer.cancel),
        }


def test_a_thread_that_waits_for_no_other_thread_may_go_on():
    """A `Deadlock` was raised in programs one of whose threads waited for a subprocess or for a message of
    another kind, since it had not communicated yet."""
    with threads_that_wait_for_no_other() as threads:
        idle = [name for name, (sleeping, wake) in threads.items() if not is_free_beside(sleeping, wake)[0]]
    assert not idle


def test_a_thread_that_only_another_one_can_wake_is_idle():
    event, items, done = threading.Event(), queue.Queue(), threading.Thread(target=lambda: event.wait())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        cases = {
            "an event": (event.wait, event.set),
            "a thread": (done.join, event.set),
            "a queue": (items.get, lambda: items.put(1)),
            "an executor": (lambda: None, lambda: None),
        }
        done.start()
        free = [name for name, (sleeping, wake) in cases.items() if is_free_beside(sleeping, wake)[0]]
    assert not free


def test_threads_of_the_same_name_are_told_apart():
    """One that was in a wait of ours hid another that was not."""
    over = threading.Event()

    def wait() -> None:
        with waiting_for(WaitReason("tea")):
            over.wait()

    waiting = threading.Thread(target=wait, name="worker")
    waiting.start()
    computing = threading.Event()

    def compute() -> None:
        while not computing.is_set():
            pass

    found, _ = is_free_beside(compute, computing.set, name="worker")
    over.set()
    waiting.join()
    assert found


def test_a_limit_of_one_call_alone_is_told():
    with waiting_for(WaitReason("tea"), 6.0):
        (own,) = take_snapshot(0, "here", [], stacks=False).waits
    with waiting_for(WaitReason("tea")):
        (other,) = take_snapshot(0, "here", [], stacks=False).waits
    assert own.own_limit
    assert not other.own_limit


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
    assert state.num_begun == {group_key((0, 1), 0): 5}
    assert state.progress == 7


def test_a_wait_shows_the_line_of_the_program_and_its_stack_ends_there():
    with waiting_for(WaitReason("tea")):
        time.sleep(0.001)
        state = take_snapshot(0, "here", [])
    (wait,) = state.waits
    assert wait.site.endswith("in test_a_wait_shows_the_line_of_the_program_and_its_stack_ends_there")
    *_, last = [line for line in state.stacks["MainThread"].splitlines() if line.startswith("  File")]
    assert last.endswith("in test_a_wait_shows_the_line_of_the_program_and_its_stack_ends_there")


def test_a_stack_ends_where_the_thread_began_to_wait():
    over = threading.Event()
    thread = threading.Thread(target=lambda: Backoff(20.0).wait_for(over.is_set), daemon=True)
    thread.start()
    time.sleep(0.2)
    stack = stack_of(sys._current_frames()[thread.ident or 0])
    over.set()
    thread.join(20.0)
    assert "waiting.py" not in stack
    assert "wait_for(over.is_set)" in stack.splitlines()[-1]
