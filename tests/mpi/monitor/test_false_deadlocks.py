"""No `Deadlock` in programs that would have gone on: only what is certain ends a wait."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from verdicts import everyone, raises_everywhere, referee

import mpisgd
from mpisgd.monitor import deadlock_detector, state_collector

pytestmark = pytest.mark.mpi(min_size=2)

LONGER_S = 1.5  # than the detector takes here


@pytest.fixture(autouse=True)
def quick_detector(monkeypatch):
    monkeypatch.setattr(deadlock_detector, "FIRST_S", 0.2)
    monkeypatch.setattr(deadlock_detector, "SURE_S", 0.2)
    monkeypatch.setattr(state_collector, "QUESTIONS_S", 0.1)
    referee().barrier()


@pytest.fixture
def group():
    """One that a Deadlock may break."""
    return mpisgd.new_group(name="for false deadlocks")


def exchange(first) -> bool:
    """Rank 0 does something before it sends; the others wait for it, in cycles. Whether all goes well."""
    last = mpisgd.size() - 1
    try:
        if mpisgd.rank() == 0:
            first(last)
            mpisgd.send(torch.tensor([3.0]), 1, tag=9)
        elif mpisgd.rank() == 1:
            mpisgd.recv(torch.zeros(1), 0, tag=9)
    except mpisgd.Deadlock:
        return False
    finally:
        referee().barrier()
    return True


def test_a_wait_with_a_limit_of_its_own_is_not_taken_for_one_that_never_ends():
    """`work.wait(timeout_s=6)` had a Deadlock after 4 s."""
    works = []

    def wait_a_while(last: int) -> None:
        works.append(mpisgd.irecv(torch.zeros(1), last, tag=8))
        with pytest.raises(mpisgd.CollectiveTimeout):
            works[0].wait(timeout_s=LONGER_S)

    good = exchange(wait_a_while)
    if mpisgd.rank() == mpisgd.size() - 1:
        mpisgd.send(torch.zeros(1), 0, tag=8)
    for work in works:
        work.wait()
    everyone(good)


def test_a_thread_that_waits_for_a_subprocess_may_still_send():
    """It had not communicated yet, and was taken to be idle."""

    def send_later(last: int) -> None:
        def run() -> None:
            subprocess.run([sys.executable, "-c", f"import time; time.sleep({LONGER_S})"], check=True)
            mpisgd.send(torch.zeros(1), last, tag=7)

        threading.Thread(target=run).start()
        mpisgd.recv(torch.zeros(1), last, tag=6)

    def answer() -> None:
        mpisgd.recv(torch.zeros(1), 0, tag=7)
        mpisgd.send(torch.zeros(1), 0, tag=6)

    other = threading.Thread(target=answer) if mpisgd.rank() == mpisgd.size() - 1 else None
    if other is not None:
        other.start()
    good = exchange(send_later)
    if other is not None:
        other.join()
    everyone(good)


def test_what_is_certain_still_ends(group):
    """The control of the two above."""
    with raises_everywhere(mpisgd.Deadlock):
        mpisgd.recv(torch.zeros(1), (mpisgd.rank() + 1) % mpisgd.size(), tag=5, group=group)
