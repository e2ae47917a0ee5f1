"""A process that does not answer is described by what the kernel knows, and by its stacks where it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mpisgd.monitor import process_inspector
from mpisgd.monitor.process_inspector import (
    ProcessIdentity,
    identify_this_process,
    inspect,
    is_stopped_or_gone,
)
from mpisgd.monitor.rank_state import GONE, STOPPED, UNRESPONSIVE
from mpisgd.monitor.watchdog import StallMonitor

PROGRAM = """
import ctypes, sys
from mpisgd.monitor.process_inspector import identify_this_process
print(*identify_this_process(), flush=True)
sys.stdin.readline()

def in_c_code():
    ctypes.PyDLL(None).usleep(20_000_000)  # keeps the interpreter's lock

in_c_code()
"""


@pytest.fixture
def child():
    """A process that can be inspected, and its identity."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    identity = ProcessIdentity(*map(int, process.stdout.readline().split()))
    yield process, identity
    process.kill()
    process.communicate()


def test_stopped_gone_and_a_number_that_another_process_has_now(child):
    process, identity = child
    assert not is_stopped_or_gone(identity)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    state = inspect(3, "here", identity, 2.0, deep=True)
    assert (state.rank, state.host, state.pid, state.state) == (3, "here", identity.pid, STOPPED)
    assert is_stopped_or_gone(identity)
    assert inspect(3, "here", identity._replace(began=identity.began + 1), 2.0, deep=True).state == GONE
    process.kill()  # it is a zombie until somebody waits for it
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert inspect(3, "here", identity, 2.0, deep=True).state == GONE
    process.communicate()
    assert inspect(3, "here", identity, 2.0, deep=True).state == GONE


def test_one_that_keeps_the_interpreters_lock_shows_its_stack_only_if_that_is_wanted(child):
    process, identity = child
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()
    state = inspect(3, "here", identity, 2.0, deep=False)
    assert (state.state, state.stacks) == (UNRESPONSIVE, {})
    assert "interpreter lock" in state.note
    for _ in range(20):  # until it has come there
        (stack,) = inspect(3, "here", identity, 2.0, deep=True).stacks.values()
        if "in in_c_code" in stack:
            break
    assert "in in_c_code" in stack


def test_the_dump_file_is_private_and_made_once():
    identity = identify_this_process()
    assert identity == identify_this_process()
    assert identity.pid == os.getpid()
    assert os.fstat(identity.dumps).st_mode & 0o777 == 0o600


def test_a_dump_shows_each_thread_once_and_not_the_stall_monitor():
    monitor_file = StallMonitor._serve.__code__.co_filename
    thread = 'Thread 0x1 (most recent call first):\n  File "train.py", line 3 in step\n'
    monitor = f'Thread 0x2 (most recent call first):\n  File "{monitor_file}", line 9 in _serve\n'
    text = process_inspector._without_repetition(f"{thread}\n{monitor}\n{thread}")
    assert text.count("train.py") == 1
    assert "_serve" not in text
