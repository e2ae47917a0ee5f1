"""The engine: idle for nothing, awake when needed, and gone when asked; whatever the main threads do."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from verdicts import everyone, raises_everywhere, referee

import mpisgd
import mpisgd.horovod as hvd
from mpisgd.horovod import state

# --- idle ---------------------------------------------------------------------------------------------


def share_of_a_core(span_s: float) -> float:
    before_s, begun = time.process_time(), time.monotonic()
    time.sleep(span_s)
    return (time.process_time() - before_s) / (time.monotonic() - begun)


def test_an_idle_engine_costs_next_to_nothing_and_says_nothing():
    hvd.allreduce(torch.ones(1))
    time.sleep(0.15)  # for a moment after an operation it expects another
    referee().Barrier()
    cycles = state.engine().num_cycles
    shares = [share_of_a_core(0.2) for _ in range(4)]  # the quietest: Python's own chores come at any time
    told = state.engine().num_cycles - cycles
    referee().Barrier()
    everyone(min(shares) < 0.04, f"{min(shares):.1%} of a core")
    everyone(told == 0, f"{told} cycles")


# --- progress without the main thread -----------------------------------------------------------------


def busy() -> None:
    sum(range(2000))


def asleep() -> None:
    time.sleep(0.02)


def until_told(doing, tag: int) -> bool:
    """Keep this thread from Horovod until every other rank has sent a message; False if one never does."""
    deadline = time.monotonic() + 40
    for other in range(1, hvd.size()):
        while not referee().Iprobe(other, tag):
            doing()
            if time.monotonic() > deadline:
                return False
        referee().recv(source=other, tag=tag)
    return True


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("doing", [busy, asleep])
def test_others_go_on_while_a_main_thread_does_something_else(doing):
    """With operations of their own, and with one that this rank has submitted."""
    others = hvd.add_process_set(range(1, hvd.size()))
    right = True
    if hvd.rank() == 0:
        handles = [hvd.allreduce_async(torch.ones(2), name=f"early.{i}", op=hvd.Sum) for i in range(3)]
        right = until_told(doing, 71)
    else:
        for i in range(4):
            total = hvd.allreduce(torch.ones(1), name=f"theirs.{i}", op=hvd.Sum, process_set=others)
            right = right and total.item() == others.size()
        handles = [hvd.allreduce_async(torch.ones(2), name=f"early.{i}", op=hvd.Sum) for i in range(3)]
    right = right and all(hvd.synchronize(handle).tolist() == [hvd.size()] * 2 for handle in handles)
    if hvd.rank() != 0:
        referee().send(None, 0, 71)
    everyone(right, "the others were kept waiting, or got something else")
    hvd.remove_process_set(others)


@pytest.mark.mpi(min_size=2)
def test_what_another_thread_submits_goes_out_while_one_waits():
    """Rank 0 waits for the first operation, which the others submit when the second one is done."""
    x = torch.ones(1)
    if hvd.rank() == 0:
        got = []
        waits = threading.Thread(target=lambda: got.append(hvd.allreduce(x, name="first", op=hvd.Sum)))
        waits.start()
        time.sleep(0.05)
        handle = hvd.allreduce_async(x, name="second", op=hvd.Sum)
        waits.join()
        totals = [got[0].item(), hvd.synchronize(handle).item()]
    else:
        totals = [hvd.allreduce(x, name=name, op=hvd.Sum).item() for name in ("second", "first")]
    everyone(totals == [hvd.size()] * 2, f"{totals}")


@pytest.mark.mpi(min_size=2)
def test_no_wake_up_is_lost_whenever_a_rank_stops_waiting():
    """Ranks come late by turns, so that the others' threads sleep, and have to be awake for the next."""
    for turn in range(4):
        if turn % hvd.size() == hvd.rank():
            time.sleep(0.12 + 0.001 * turn)
        hvd.allreduce(torch.ones(1), name="late")
        handle = hvd.allreduce_async(torch.ones(1), name="behind")
        if turn % hvd.size() == hvd.rank():
            deadline = time.monotonic() + 20
            while not hvd.poll(handle) and time.monotonic() < deadline:  # nobody waits on this rank
                time.sleep(0.001)
        hvd.synchronize(handle)


@pytest.mark.mpi(min_size=2)
def test_who_is_interrupted_while_waiting_may_wait_again():
    """Ctrl-C on one rank is that rank's business, and not an error of the operation."""
    handle = hvd.allreduce_async(torch.ones(1), name="interrupted", op=hvd.Sum) if hvd.rank() == 0 else None
    if handle is not None:
        main = threading.get_ident()
        timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            hvd.synchronize(handle)
        timer.join()
        signal.signal(signal.SIGINT, before)
    hvd.allreduce(torch.ones(1), name="goes on")
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(1), name="interrupted", op=hvd.Sum)
    everyone(hvd.synchronize(handle).item() == hvd.size())


# --- who is who ---------------------------------------------------------------------------------------


def test_ranks_are_those_of_the_job():
    assert (hvd.rank(), hvd.size()) == (mpisgd.rank(), mpisgd.size())
    assert (hvd.local_rank(), hvd.local_size()) == (mpisgd.local_rank(), mpisgd.local_size())
    if mpisgd.num_nodes() == 1:
        assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
        assert hvd.is_homogeneous()
    sizes = referee().allgather((hvd.local_rank(), hvd.cross_size()))
    assert sum(cross for local, cross in sizes if local == 0) == mpisgd.num_nodes() ** 2
    assert hvd.mpi_threads_supported() in (True, False)
    hvd.init()  # a second time: nothing happens
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


# --- the end ------------------------------------------------------------------------------------------


def test_shutdown_and_init_again():
    first = state.engine()
    handle = hvd.allreduce_async(torch.ones(2), name="under way", op=hvd.Sum)
    hvd.shutdown()
    assert not hvd.is_initialized()
    with raises_everywhere(ValueError) as caught:
        hvd.allreduce(torch.ones(1))
    assert "Horovod has not been initialized; use hvd.init()." in caught.text
    hvd.shutdown()
    hvd.init()
    everyone(state.engine() is not first, "the engine that was shut down is used again")
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2
    assert hvd.allreduce(torch.ones(1), name="under way", op=hvd.Sum).item() == hvd.size()


def test_init_with_process_sets():
    """Named by their ranks, by communicators that differ by rank, and wrongly."""
    from mpi4py import MPI

    hvd.shutdown()
    rank, size = referee().rank, referee().size
    comm = MPI.COMM_WORLD.Split(rank % 2, rank)
    last, mine = hvd.ProcessSet([size - 1]), hvd.ProcessSet(comm)
    hvd.init(process_sets=[last, mine] if size > 1 else "dynamic")
    if size > 1:
        assert mine.ranks == list(range(rank % 2, size, 2))
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item() == mine.size()
        if last.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=last).item() == 1
    comm.Free()
    hvd.shutdown()
    if size > 2:
        with raises_everywhere(ValueError) as caught:
            hvd.init(process_sets=[hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 0])])
        assert "Attempted to add a duplicate process set: [0, 1]" in caught.text
        assert hvd.is_initialized()
        hvd.shutdown()
    hvd.init()


@pytest.mark.mpi(min_size=2)
def test_who_waits_for_a_rank_that_has_shut_down_is_told():
    """For an operation, and for all to join."""
    for call, said in [
        (lambda: hvd.allreduce(torch.ones(1), name="alone"), "tensor 'alone': rank"),
        (hvd.join, "join: rank"),
    ]:
        if hvd.rank() == 0:
            with pytest.raises(hvd.HorovodInternalError, match="has shut down without") as caught:
                call()
            assert str(caught.value).startswith(said)
        hvd.shutdown()
        hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
