"""Process sets: operations among some ranks, beside each other, one within the other, and for a while."""

from __future__ import annotations

import random
import time

import pytest
import torch
from closed_form import given
from reductions import near
from verdicts import everyone, raises_everywhere, referee

import mpisgd.horovod as hvd


def halves() -> list[list[int]]:
    size = hvd.size()
    return [list(range(start, size, 2)) for start in range(min(2, size))]


@pytest.fixture
def half():
    """The ranks that are even, or odd, as this one is. One rank alone has the whole world."""
    if hvd.size() == 1:
        yield hvd.global_process_set
        return
    made = [hvd.add_process_set(ranks) for ranks in halves()]
    yield made[hvd.rank() % 2]
    assert all(hvd.remove_process_set(process_set) for process_set in made)


def test_who_is_in_it(half):
    ranks = halves()[hvd.rank() % 2]
    assert half.ranks == ranks or half is hvd.global_process_set
    assert (half.size(), half.rank(), half.included()) == (len(ranks), ranks.index(hvd.rank()), True)
    everyones = hvd.global_process_set
    assert (everyones.size(), everyones.rank(), everyones.process_set_id) == (hvd.size(), hvd.rank(), 0)


def test_every_operation(half):
    """The halves do different things at the same time."""
    side, ranks, shape = hvd.rank() % 2, halves()[hvd.rank() % 2], (2 * half.size(), 3 + hvd.rank() % 2)
    xs = [given(rank, torch.float64, shape) for rank in ranks]
    x, mine = xs[half.rank()], half.rank()
    near(hvd.allreduce(x, name="x", process_set=half), sum(xs) / len(ranks))
    near(hvd.grouped_allreduce([x], op=hvd.Sum, process_set=half)[0], sum(xs))
    near(hvd.allgather(x[: mine + 1], process_set=half), torch.cat([t[: i + 1] for i, t in enumerate(xs)]))
    near(hvd.broadcast(x, ranks[-1], process_set=half), xs[-1])
    everyones = torch.cat([t[2 * mine : 2 * mine + 2] for t in xs])
    near(hvd.alltoall(x, process_set=half), everyones)
    received, counts = hvd.alltoall(x, [2] * len(ranks), process_set=half)
    near(received, everyones)
    assert counts.tolist() == [2] * len(ranks)
    near(hvd.reducescatter(x, op=hvd.Sum, process_set=half), sum(xs)[2 * mine : 2 * mine + 2])
    assert hvd.broadcast_object((side, hvd.rank()), ranks[0], process_set=half) == (side, ranks[0])
    assert hvd.allgather_object(hvd.rank(), process_set=half) == ranks
    hvd.barrier(half)


def test_gradients(half):
    ranks = halves()[hvd.rank() % 2]
    x = given(hvd.rank(), torch.float64, (len(ranks),)).requires_grad_()
    weights = [given(rank + 5, torch.float64, (len(ranks) ** 2,)) for rank in ranks]
    hvd.allgather(x, process_set=half).backward(weights[half.rank()])
    near(x.grad, (sum(weights) / len(ranks)).split(len(ranks))[half.rank()])
    x.grad = None
    hvd.broadcast(x, ranks[0], process_set=half).sum().backward()
    assert x.grad.tolist() == [float(hvd.rank() == ranks[0])] * len(ranks)
    x.grad = None
    hvd.reducescatter(x, op=hvd.Sum, process_set=half).sum().backward()
    assert x.grad.tolist() == [float(len(ranks))] * len(ranks)


@pytest.mark.mpi(min_size=3)
def test_sets_that_overlap_in_any_order():
    """Every pair of ranks is a set: together with the world they cannot be put in a row."""
    size = hvd.size()
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    sets = {pair: hvd.add_process_set(pair) for pair in pairs}
    mine = [pair for pair in pairs if hvd.rank() in pair]
    for turn in range(4):
        handles = {}
        for pair in random.Random(f"{turn} {hvd.rank()}").sample(mine, len(mine)):
            x = torch.tensor([float(turn + hvd.rank())])
            handles[pair] = hvd.allreduce_async(x, name="x", op=hvd.Sum, process_set=sets[pair])
        total = hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum)
        sums = {pair: hvd.synchronize(handle).item() for pair, handle in handles.items()}
        everyone(sums == {pair: sum(pair) + 2 * turn for pair in mine} and total.item() == size, f"{sums}")
    for pair in reversed(pairs):
        assert hvd.remove_process_set(sets[pair])


@pytest.mark.mpi(min_size=3)
def test_a_mismatch_concerns_the_members_alone():
    members = hvd.add_process_set([0, 1])
    if hvd.rank() < 2:
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 gave \[1\], rank 1 gave \[2\]"):
            hvd.allreduce(torch.ones(hvd.rank() + 1), name="x", process_set=members)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    hvd.remove_process_set(members)


@pytest.mark.mpi(min_size=2)
def test_those_outside_are_told_so():
    alone = hvd.add_process_set([hvd.size() - 1])
    member = hvd.rank() == hvd.size() - 1
    assert alone.included() == member
    assert alone.size() == 1
    for call in (
        lambda: hvd.allreduce(torch.ones(1), process_set=alone),
        lambda: hvd.allgather(torch.ones(1), process_set=alone),
        lambda: hvd.broadcast(torch.ones(1), hvd.size() - 1, process_set=alone),
        lambda: hvd.alltoall(torch.ones(1), process_set=alone),
        lambda: hvd.reducescatter(torch.ones(1), process_set=alone),
        lambda: hvd.barrier(alone),
        lambda: hvd.broadcast_object(1, hvd.size() - 1, process_set=alone),
    ):
        if member:
            call()
        else:
            with pytest.raises(ValueError, match=f"Rank {hvd.rank()} is not a member of the provided"):
                call()
    if member:
        with pytest.raises(ValueError, match="invalid root rank 0"):
            hvd.broadcast(torch.ones(1), 0, process_set=alone)
    else:
        with pytest.raises(ValueError, match="is not in ProcessSet"):
            alone.rank()
    hvd.remove_process_set(alone)


def test_sets_that_cannot_be():
    size = hvd.size()
    for ranks in ([], [-1], [size], [0, 0]):
        with raises_everywhere(ValueError) as caught:
            hvd.add_process_set(ranks)
        assert f"the job has the ranks 0 to {size - 1}" in caught.text
    with raises_everywhere(ValueError) as caught:
        hvd.add_process_set(range(size))
    assert "Attempted to add a duplicate process set" in caught.text
    with raises_everywhere(ValueError) as caught:
        hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0]))
    assert "does not exist, or has not been registered" in caught.text


@pytest.mark.mpi(min_size=2)
def test_what_its_members_have_submitted_fails_where_all_others_remove_the_set_first():
    """All ranks then learn of both in one cycle, and of the removal first."""
    last = hvd.size() - 1
    alone = hvd.add_process_set([last])
    if hvd.rank() == last:
        time.sleep(0.1)
        handle = hvd.allreduce_async(torch.ones(1), name="too late", process_set=alone)
    hvd.remove_process_set(alone)
    if hvd.rank() == last:
        with pytest.raises(hvd.HorovodInternalError, match=r"'too late'.*was removed"):
            hvd.synchronize(handle)


@pytest.mark.mpi(min_size=2)
def test_removed_and_added_again():
    first = hvd.add_process_set([0])
    number = first.process_set_id
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(first)
    with raises_everywhere(ValueError):
        hvd.allreduce(torch.ones(1), process_set=first)
    with raises_everywhere(ValueError):
        first.included()
    assert hvd.add_process_set(first) is first
    everyone(first.process_set_id != number, "the number of a removed set was given out again")
    if first.included():
        assert hvd.allreduce(torch.ones(1), process_set=first).item() == 1
    hvd.remove_process_set(first)


@pytest.mark.mpi(min_size=2)
def test_different_sets_at_the_same_time_are_a_mismatch():
    """Each rank would wait for the others to ask for its own."""
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        hvd.add_process_set([0 if hvd.rank() == 0 else 1])
    assert "rank 0 gave [0]" in caught.text
    one = hvd.add_process_set([0])
    with raises_everywhere(hvd.HorovodInternalError):
        hvd.remove_process_set(one) if hvd.rank() == 0 else hvd.add_process_set([1])
    assert hvd.remove_process_set(one)


@pytest.mark.mpi(min_size=3)
def test_removal_ends_what_is_pending_in_the_set():
    members = hvd.add_process_set([0, 1])
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="left behind", process_set=members)
    hvd.remove_process_set(members)
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"'left behind'.*removed"):
            hvd.synchronize(handle)
    everyone(hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size())


@pytest.mark.mpi(min_size=2)
def test_from_communicators_that_differ_by_rank():
    """As mpi4py's Split gives them: each rank gets the set that it is in."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(hvd.rank() % 2, -hvd.rank())
    mine = hvd.add_process_set(hvd.ProcessSet(comm))
    assert mine.ranks == halves()[hvd.rank() % 2]
    assert mine.mpi_comm is comm
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine).item() == mine.size()
    again = hvd.add_process_set(comm)
    assert again.process_set_id == mine.process_set_id
    for number, ranks in enumerate(halves()):  # removed by number: everyone names both
        other = hvd.ProcessSet(ranks)
        other.process_set_id = min(referee().allgather(mine.process_set_id)) + number
        assert hvd.remove_process_set(other)
    comm.Free()


@pytest.mark.mpi(min_size=2)
def test_from_a_communicator_that_some_ranks_are_not_in():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(0 if hvd.rank() else MPI.UNDEFINED, 0)
    some = hvd.add_process_set(comm)
    assert some.ranks == list(range(1, hvd.size()))
    assert some.included() == (hvd.rank() > 0)
    hvd.remove_process_set(some)
    if comm:
        comm.Free()
