"""Who of a host's ranks prints: one at a time, and of an error one, also where that one is gone by then."""

from __future__ import annotations

import os
import threading

import pytest

from mpisgd.monitor.console import ConsoleLock


@pytest.fixture
def ranks():
    """Three ranks of a host as far as this is concerned: descriptors of one file, each opened by itself."""
    first = os.memfd_create("console")
    locks = []
    for file in (first, *(os.open(f"/proc/self/fd/{first}", os.O_RDWR) for _ in range(2))):
        lock = ConsoleLock.__new__(ConsoleLock)
        lock._file, lock._threads = file, threading.Lock()
        locks.append(lock)
    yield locks
    for lock in locks:
        lock.close()


def test_one_prints_an_error(ranks):
    assert [lock.claim_error(0.0) for lock in ranks] == [True, False, False]


def test_nobody_prints_an_error_after_one_who_is_gone(ranks):
    first, second, third = ranks
    assert second.claim_error(0.0)
    second.close()
    assert not first.claim_error(0.0)
    assert not third.claim_error(0.0)


def test_one_holds_the_lock_at_a_time(ranks):
    first, second, _ = ranks
    assert first.acquire(0.0)
    assert not second.acquire(0.0)
    assert not first.acquire(0.0)  # another thread of the same process is no exception
    first.release()
    assert second.acquire(0.0)
    second.close()  # as the kernel does when a process ends
    assert first.acquire(0.0)


def test_who_waits_for_the_lock_does_something_else_meanwhile(ranks):
    first, second, _ = ranks
    assert first.acquire(0.0)
    assert second.acquire(20.0, lambda seconds: first.release())


def test_an_error_is_printed_also_while_a_report_does_not_end(ranks):
    first, second, third = ranks
    assert first.acquire(0.0)
    assert second.claim_error(0.05)
    assert not third.claim_error(0.0)
