"""Ranks that wait for each other for ever are told so; those that may yet come are waited for."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from verdicts import everyone, referee

import mpisgd
import mpisgd.horovod as hvd
from mpisgd.horovod.engine import stall_inspector
from mpisgd.job.lifecycle import current_job
from mpisgd.monitor import deadlock_detector, state_collector, watchdog

pytestmark = pytest.mark.mpi(min_size=2)

LIMIT_S = 10.0
SOON_S = 0.2


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for ranks that wait for each other early."""
    monkeypatch.setattr(deadlock_detector, "FIRST_S", SOON_S)
    monkeypatch.setattr(deadlock_detector, "SURE_S", SOON_S)
    monkeypatch.setattr(watchdog, "CHECK_S", SOON_S / 2)
    monkeypatch.setattr(state_collector, "QUESTIONS_S", SOON_S / 2)
    current_job().monitor.collector.shm.wake()


def end_of(call) -> tuple[str, str, float]:
    """What came of a call on this rank: the error's kind and text, and after how many seconds."""
    referee().barrier()
    began_s = time.monotonic()
    try:
        call()
    except mpisgd.MpisgdError as exc:
        return type(exc).__name__, str(exc), time.monotonic() - began_s
    return "nothing", "", time.monotonic() - began_s


def check_all_told(end: tuple[str, str, float], *words: str) -> None:
    kind, text, took_s = end
    right = kind in ("HorovodInternalError", "Deadlock") and all(word in text for word in words)
    everyone(right and took_s < LIMIT_S, f"{kind} after {took_s:.1f} s: {text}")


def check_it_goes_on() -> None:
    """What was submitted by name works again, under the same names too."""
    for name in ("even", "odd", "another"):
        mine = torch.full((3,), float(hvd.rank() + 1))
        total = hvd.allreduce(mine, name=name, op=hvd.Sum)
        everyone(total.tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 3, f"{total}")


def test_other_names_on_other_ranks():
    """Each waits for what the others will never submit; what is under way besides is no obstacle."""
    mine = "odd" if hvd.rank() % 2 else "even"
    handle = hvd.allreduce_async(torch.ones(2), name="another", op=hvd.Sum) if hvd.rank() else None
    end = end_of(lambda: hvd.allreduce(torch.ones(1), name=mine))
    check_all_told(
        end, "hvd.allreduce 'even'", "hvd.allreduce 'odd'", "rank 0 waits for", "test_horovod_dead"
    )
    assert end[0] == "HorovodInternalError"
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(2), name="another", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2
    check_it_goes_on()


def test_an_operation_of_ours_and_one_of_horovods():
    group = mpisgd.new_group()
    last = hvd.rank() == hvd.size() - 1
    end = end_of(lambda: mpisgd.barrier(group) if last else hvd.allgather(torch.ones(1), name="rows"))
    check_all_told(end, "barrier()", "hvd.allgather 'rows'", f"waits for rank {hvd.size() - 1}")
    check_it_goes_on()
    current_job().groups.remove(group)  # of no use any more


@pytest.mark.mpi(min_size=3)
def test_a_join_and_an_operation_that_it_does_not_take_part_in():
    """Who has joined takes part in what all ranks do, but not in what is done in a process set."""
    some = hvd.add_process_set([0, hvd.size() - 1])

    def call() -> None:
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(1), name="two", process_set=some)
        else:
            hvd.join()

    check_all_told(end_of(call), "hvd.allreduce 'two'", "hvd.join", "rank 0 waits for rank")
    check_it_goes_on()
    everyone(hvd.join() >= 0)
    hvd.remove_process_set(some)


@pytest.mark.parametrize("who", ["program", "thread"])
def test_who_may_yet_come_is_waited_for(who):
    """A rank in its own code, or one of whose threads is there while the main one waits in a circle."""
    x = torch.ones(1)
    totals: list[float] = []

    def late() -> None:
        time.sleep(8 * SOON_S)
        totals.append(hvd.allreduce(x, name="even", op=hvd.Sum).item())

    def call() -> None:
        if hvd.rank() != 0:
            totals.extend(hvd.allreduce(x, name=name, op=hvd.Sum).item() for name in ("even", "odd"))
        elif who == "program":
            late()
            totals.append(hvd.allreduce(x, name="odd", op=hvd.Sum).item())
        else:
            thread = threading.Thread(target=late)
            thread.start()
            totals.append(hvd.allreduce(x, name="odd", op=hvd.Sum).item())
            thread.join()

    kind, text, _ = end_of(call)
    everyone(kind == "nothing" and totals == [hvd.size()] * 2, f"{kind}: {text} {totals}")


def test_a_clash_of_operations_is_told_as_one(monkeypatch):
    """The names are the same: what is wrong is known better than that nobody goes on."""
    monkeypatch.setattr(stall_inspector, "GRACE_S", 8 * SOON_S)
    kind, text, _ = end_of(
        lambda: (
            hvd.allreduce(torch.ones(1), name="clash")
            if hvd.rank()
            else hvd.allgather(torch.ones(1), name="clash")
        )
    )
    everyone(kind == "HorovodInternalError" and "mismatched operation" in text, f"{kind}: {text}")
    check_it_goes_on()
