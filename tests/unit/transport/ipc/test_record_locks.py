"""Locks that a killed process does not keep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from mpisgd.transport.ipc.record_locks import NOBODY, RecordLocks

OTHER = """
import os, sys, time
from mpisgd.transport.ipc.record_locks import RecordLocks

locks = RecordLocks(os.open(sys.argv[1], os.O_RDWR), 2, 1, 2)
print(locks.try_lock(0), flush=True)
time.sleep(60)
"""


@pytest.fixture
def fd():
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4096)
    return fd


def test_a_killed_holder_gives_its_lock_back_and_is_named(fd):
    mine = RecordLocks(fd, 2, 0, 2)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    with subprocess.Popen([sys.executable, "-c", OTHER, path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert mine.is_alive(1)
        assert not mine.try_lock(0)
        assert mine.holder(0) == 1
        assert mine.try_lock(1)  # another one
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert not mine.is_alive(1)
        assert mine.try_lock(0)
        assert mine.lost_holder(0) == 1
        mine.unlock(0)
        assert mine.try_lock(0)
        assert mine.lost_holder(0) == NOBODY


def test_threads_of_one_process_keep_each_other_out(fd):
    locks, got = RecordLocks(fd, 1, 0, 1), []
    assert locks.try_lock(0)
    thread = threading.Thread(target=lambda: got.append(locks.try_lock(0)))
    thread.start()
    thread.join()
    assert got == [False]
    locks.unlock(0)
    assert locks.try_lock(0)
