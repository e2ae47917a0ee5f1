"""Any rank learns at any time what all others do, whatever they are in the middle of."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from verdicts import everyone, referee

import mpisgd
from mpisgd.job.lifecycle import current_job, world
from mpisgd.monitor.rank_state import RUNS, WAITS, RankState, Wait

pytestmark = pytest.mark.mpi(min_size=2)

LONG_ENOUGH_S = 0.3  # for a wait to be noted
SOON_S = 10.0


def ask_until(holds) -> list[RankState]:
    """What all ranks do, asked until something holds, which takes the others a moment."""
    deadline = time.monotonic() + SOON_S
    while True:
        states = current_job().monitor.collect()
        if holds(states) or time.monotonic() > deadline:
            return states
        time.sleep(0.05)


def main_waits(state: RankState) -> list[Wait]:
    return [wait for wait in state.waits if wait.is_main]


@pytest.mark.parametrize("asker", ["first", "last"])
def test_who_waits_says_in_which_operation_since_when_and_where(asker):
    asks = mpisgd.rank() == (0 if asker == "first" else mpisgd.size() - 1)
    number = world().queue.consistency.number + 1
    verdict, text = True, ""
    if asks:
        states = ask_until(lambda states: sum(state.state == WAITS for state in states) == mpisgd.size() - 1)
        for state in states:
            waits = main_waits(state)
            text += f"{state}\n"
            if state.rank == mpisgd.rank():
                verdict &= state.state == RUNS and not waits
                continue
            verdict &= len(waits) == 1 and waits[0].what.startswith("all_reduce(op=MAX")
            verdict &= (waits[0].group, waits[0].number) == ("world", number)
            verdict &= waits[0].members == tuple(range(mpisgd.size()))
            verdict &= "test_monitor.py" in waits[0].site and 0.09 < waits[0].waited_s < SOON_S
            verdict &= waits[0].timeout_s == world().queue.consistency.timeout_s
            verdict &= "test_who_waits_says" in state.stacks["MainThread"]
    mpisgd.all_reduce(torch.tensor([float(mpisgd.rank())]), mpisgd.ReduceOp.MAX)
    everyone(verdict, text)


def test_who_waits_for_a_message_says_from_whom():
    last = mpisgd.size() - 1
    verdict, text = True, ""
    if mpisgd.rank() == 0:
        states = ask_until(lambda states: main_waits(states[last]))
        (wait,) = main_waits(states[last])
        verdict, text = wait.awaited == (0,) and wait.number == 0, f"{wait}"
        mpisgd.send(torch.ones(3), last)
    elif mpisgd.rank() == last:
        mpisgd.recv(torch.zeros(3), 0)
    everyone(verdict, text)


def test_an_asynchronous_operation_shows_on_its_thread_and_on_the_one_that_waits():
    verdict, text = True, ""
    if mpisgd.rank() == 0:
        states = ask_until(lambda states: len(states[1].waits) == 2)
        text = f"{states[1].waits}"
        own, other = sorted(states[1].waits, key=lambda wait: not wait.is_main)
        verdict = own.timeout_s is None and "asynchronous" in own.what
        verdict &= other.what.startswith("barrier") and "queue" in other.thread and not other.is_main
    work = mpisgd.barrier(async_op=True)
    assert work is not None
    work.wait()
    everyone(verdict, text)


def test_what_moves_is_seen_and_what_does_not_stays_the_same():
    before = current_job().monitor.collect()
    referee().barrier()
    again = current_job().monitor.collect()
    same = [state.progress for state in again] == [state.progress for state in before]
    referee().barrier()
    mpisgd.barrier()
    after = current_job().monitor.collect()
    everyone(same and all(b.progress > a.progress for a, b in zip(before, after, strict=True)))


def test_all_may_ask_at_once_and_from_several_threads():
    found: list[list[RankState]] = []
    threads = [
        threading.Thread(target=lambda: found.append(current_job().monitor.collect())) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [[state.rank for state in states if state.state == RUNS] for states in found]
    referee().barrier()
    everyone(answers == [list(range(mpisgd.size()))] * 3, f"{answers}")
