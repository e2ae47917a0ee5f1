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
        views = current_job().watch.ask()
        if holds(views) or time.monotonic() > deadline:
            return views
        time.sleep(0.05)


def main_waits(view: RankState) -> list[Wait]:
    return [wait for wait in view.waits if wait.main]


@pytest.mark.parametrize("asker", ["first", "last"])
def test_who_waits_says_in_which_operation_since_when_and_where(asker):
    asks = mpisgd.rank() == (0 if asker == "first" else mpisgd.size() - 1)
    number = world().queue.consistency.number + 1
    verdict, text = True, ""
    if asks:
        views = ask_until(lambda views: sum(view.state == WAITS for view in views) == mpisgd.size() - 1)
        for view in views:
            waits = main_waits(view)
            text += f"{view}\n"
            if view.rank == mpisgd.rank():
                verdict &= view.state == RUNS and not waits
                continue
            verdict &= len(waits) == 1 and waits[0].what.startswith("all_reduce(op=MAX")
            verdict &= (waits[0].group, waits[0].number) == ("world", number)
            verdict &= waits[0].members == tuple(range(mpisgd.size()))
            verdict &= "test_diagnosis.py" in waits[0].site and 0.09 < waits[0].waited_s < SOON_S
            verdict &= waits[0].limit_s == world().queue.consistency.timeout_s
            verdict &= "test_who_waits_says" in view.stacks["MainThread"]
    mpisgd.all_reduce(torch.tensor([float(mpisgd.rank())]), mpisgd.ReduceOp.MAX)
    everyone(verdict, text)


def test_who_waits_for_a_message_says_from_whom():
    last = mpisgd.size() - 1
    verdict, text = True, ""
    if mpisgd.rank() == 0:
        views = ask_until(lambda views: main_waits(views[last]))
        (wait,) = main_waits(views[last])
        verdict, text = wait.whom == (0,) and wait.number == 0, f"{wait}"
        mpisgd.send(torch.ones(3), last)
    elif mpisgd.rank() == last:
        mpisgd.recv(torch.zeros(3), 0)
    everyone(verdict, text)


def test_an_asynchronous_operation_shows_on_its_thread_and_on_the_one_that_waits():
    verdict, text = True, ""
    if mpisgd.rank() == 0:
        views = ask_until(lambda views: len(views[1].waits) == 2)
        text = f"{views[1].waits}"
        own, other = sorted(views[1].waits, key=lambda wait: not wait.main)
        verdict = own.limit_s is None and "asynchronous" in own.what
        verdict &= other.what.startswith("barrier") and "queue" in other.thread and not other.main
    work = mpisgd.barrier(async_op=True)
    assert work is not None
    work.wait()
    everyone(verdict, text)


def test_what_moves_is_seen_and_what_does_not_stays_the_same():
    before = current_job().watch.ask()
    referee().barrier()
    again = current_job().watch.ask()
    same = [view.moves for view in again] == [view.moves for view in before]
    referee().barrier()
    mpisgd.barrier()
    after = current_job().watch.ask()
    everyone(same and all(b.moves > a.moves for a, b in zip(before, after, strict=True)))


def test_all_may_ask_at_once_and_from_several_threads():
    found: list[list[RankState]] = []
    threads = [threading.Thread(target=lambda: found.append(current_job().watch.ask())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [[view.rank for view in views if view.state == RUNS] for views in found]
    referee().barrier()
    everyone(answers == [list(range(mpisgd.size()))] * 3, f"{answers}")
