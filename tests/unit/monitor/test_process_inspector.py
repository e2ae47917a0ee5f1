"""A process that does not answer is described by what the kernel knows, and by its stacks where it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mpisgd.monitor.process_inspector import ProcessIdentity, describe, is_stopped_or_gone, take_seat
from mpisgd.monitor.rank_state import GONE, SILENT, STOPPED

PROGRAM = """
import ctypes, sys
from mpisgd.monitor.process_inspector import take_seat
print(*take_seat(), flush=True)
sys.stdin.readline()

def in_c_code():
    ctypes.PyDLL(None).usleep(20_000_000)  # keeps the interpreter's lock

in_c_code()
"""


@pytest.fixture
def child():
    """A process that has taken its seat, and where that is."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seat = ProcessIdentity(*map(int, process.stdout.readline().split()))
    yield process, seat
    process.kill()
    process.communicate()


def test_stopped_gone_and_a_number_that_another_process_has_now(child):
    process, seat = child
    assert not is_stopped_or_gone(seat)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    view = describe(3, "here", seat, 2.0, deep=True)
    assert (view.rank, view.host, view.pid, view.state) == (3, "here", seat.pid, STOPPED)
    assert is_stopped_or_gone(seat)
    assert describe(3, "here", seat._replace(began=seat.began + 1), 2.0, deep=True).state == GONE
    process.kill()  # it is a zombie until somebody waits for it
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert describe(3, "here", seat, 2.0, deep=True).state == GONE
    process.communicate()
    assert describe(3, "here", seat, 2.0, deep=True).state == GONE


def test_one_that_keeps_the_interpreters_lock_shows_its_stack_only_if_that_is_wanted(child):
    process, seat = child
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()
    view = describe(3, "here", seat, 2.0, deep=False)
    assert (view.state, view.stacks) == (SILENT, {})
    assert "interpreter lock" in view.note
    for _ in range(20):  # until it has come there
        (stack,) = describe(3, "here", seat, 2.0, deep=True).stacks.values()
        if "in in_c_code" in stack:
            break
    assert "in in_c_code" in stack


def test_a_seat_is_private_and_taken_once():
    seat = take_seat()
    assert seat == take_seat()
    assert seat.pid == os.getpid()
    assert os.fstat(seat.dumps).st_mode & 0o777 == 0o600
