"""`Window`: what each rank writes into the memory of others, and reads there; mistakes; locks."""

from __future__ import annotations

import time

import pytest
import torch
from pretended_hosts import group_of_hosts
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import ReduceOp
from mpisgd.job.lifecycle import world


def given(rank: int, dtype: torch.dtype, length: int = 5) -> torch.Tensor:
    return (torch.arange(length) + 10 * rank + 1).to(dtype)


def neighbour(group: mpisgd.Group) -> int:
    return group.ranks[(group.rank + 1) % group.size]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.bool], ids=str)
def test_put_reaches_the_neighbour_and_get_reads_it_back(group, dtype):
    window = mpisgd.Window(torch.zeros(2, 4, dtype=dtype), group)
    window.put(given(group.rank, dtype), neighbour(group), offset=2)
    window.fence()
    before = group.ranks.index(mpisgd.rank()) - 1
    expected = torch.cat([torch.zeros(2), given(before % group.size, dtype).double(), torch.zeros(1)])
    everyone(torch.equal(window.tensor.view(-1).double(), expected), f"{window.tensor}")
    out = torch.empty(5, dtype=dtype)
    everyone(torch.equal(window.get(out, neighbour(group), offset=2), given(group.rank, dtype)), f"{out}")
    window.free()


def test_shapes_may_differ_and_first_values_are_those_given(group):
    mine = torch.full((group.rank, 2), group.rank + 0.5)
    window = mpisgd.Window(mine, group)
    everyone(window.shapes == tuple((rank, 2) for rank in range(group.size)), f"{window.shapes}")
    everyone(window.tensor.shape == mine.shape and torch.equal(window.tensor, mine))
    last = group.size - 1
    seen = window.get(torch.empty(last, 2), group.ranks[last])
    everyone(torch.equal(seen, torch.full((last, 2), last + 0.5)), f"{seen}")


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT], ids=str)
def test_what_all_accumulate_is_there_whole(group, op):
    start = torch.ones(7, dtype=torch.float64)
    window = mpisgd.Window(start, group)
    terms = [torch.arange(7, dtype=torch.float64) + rank + 1 for rank in range(group.size)]
    window.accumulate(terms[group.rank], group.ranks[0], op)
    window.fence()
    combine = {ReduceOp.SUM: torch.add, ReduceOp.MAX: torch.maximum, ReduceOp.PRODUCT: torch.mul}[op]
    expected = start
    for term in terms:
        expected = combine(expected, term)
    everyone(group.rank != 0 or torch.equal(window.tensor, expected), f"{window.tensor}")


def test_tickets_of_fetch_and_op_are_all_different(group):
    window = mpisgd.Window(torch.zeros(1, dtype=torch.int64), group)
    one = torch.ones(1, dtype=torch.int64)
    tickets = [int(window.fetch_and_op(one, group.ranks[0])) for _ in range(200)]
    window.fence()
    everyones: list[list[int]] = [[] for _ in range(group.size)]
    mpisgd.all_gather_object(everyones, tickets, group)
    everyone(sorted(ticket for some in everyones for ticket in some) == list(range(200 * group.size)))
    everyone(tickets == sorted(tickets))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_one_rank_alone_swaps(group, dtype):
    window = mpisgd.Window(torch.zeros(3, dtype=dtype), group)
    mine = torch.full((3,), group.rank + 1).to(dtype)
    before = window.compare_and_swap(torch.zeros(3, dtype=dtype), mine, group.ranks[0])
    window.fence()
    winner = window.get(torch.empty(3, dtype=dtype), group.ranks[0])
    everyone(torch.equal(before, torch.zeros(3, dtype=dtype)) == torch.equal(winner, mine), f"{before}")


def test_a_lock_makes_reading_and_writing_one(group):
    window = mpisgd.Window(torch.zeros(2, dtype=torch.int64), group)
    for _ in range(50):
        with window.locked(group.ranks[-1]):
            seen = window.get(torch.empty(2, dtype=torch.int64), group.ranks[-1])
            window.put(seen + 1, group.ranks[-1])
    window.fence()
    total = window.get(torch.empty(2, dtype=torch.int64), group.ranks[-1])
    everyone(total.tolist() == [50 * group.size] * 2, f"{total}")


@pytest.mark.mpi(min_size=2)
def test_a_lock_that_is_not_given_back_is_named_at_the_timeout():
    window = mpisgd.Window(torch.zeros(1))
    if mpisgd.rank() == 0:
        window.lock(1)
    mpisgd.barrier()
    error = ""
    if mpisgd.rank():
        started = time.monotonic()
        try:
            window.lock(1, timeout_s=0.2)
        except mpisgd.CollectiveTimeout as exc:
            error = str(exc)
        assert time.monotonic() - started < 20
    everyone(mpisgd.rank() == 0 or "rank 0 to unlock rank 1" in error, error)
    mpisgd.barrier()
    if mpisgd.rank() == 0:
        window.unlock(1)


def test_mistakes_are_found_on_the_rank_that_makes_them():
    window = mpisgd.Window(torch.zeros(4))
    with raises_everywhere(mpisgd.UnsupportedTensor):
        window.put(torch.zeros(4, dtype=torch.float64), 0)
    with raises_everywhere(mpisgd.ShapeMismatch) as caught:
        window.put(torch.ones(3), 0, offset=2)
    everyone("3 elements, offset=2; the memory of rank 0 has 4" in caught.text, caught.text)
    with raises_everywhere(mpisgd.InvalidRank):
        window.get(torch.zeros(1), mpisgd.size())
    with raises_everywhere(mpisgd.UnsupportedOp):
        window.accumulate(torch.zeros(1), 0, ReduceOp.AVG)
    with raises_everywhere(mpisgd.ShapeMismatch):
        window.compare_and_swap(torch.zeros(2), torch.zeros(1), 0)
    window.fence()
    everyone(not window.tensor.any(), "something was written")
    window.free()
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        window.put(torch.zeros(1), 0)
    everyone("was freed" in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_another_dtype_on_one_rank_is_found_on_all():
    with raises_everywhere(mpisgd.CollectiveMismatch):
        mpisgd.Window(torch.zeros(1, dtype=torch.float32 if mpisgd.rank() else torch.float64))


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_the_end_of_a_job_frees_a_window_whose_group_was_closed(num_hosts):
    """It asked the group, which raised, and what came after it at the end was not done."""
    at_end, size = world().job.at_end, mpisgd.size()
    kept = len(at_end)
    leaders = [0] * size if num_hosts == 1 else [0, *[1] * (size - 1)]
    with group_of_hosts(leaders) as group:
        window = mpisgd.Window(torch.ones(3), group)
    for end in at_end[kept:]:
        end()
    del at_end[kept:]
    with raises_everywhere(mpisgd.MpisgdError):
        window.get(torch.empty(3), 0)
    everyone(window._memory is None)
