"""Input and output in one memory: MPI forbids it, callers do it all the time."""

from __future__ import annotations

import pytest
import torch
from closed_form import assert_equal, assert_near, combined, given

import mpisgd
from mpisgd import ReduceOp

lengths = pytest.mark.parametrize("length", [1, 3, 5000])


@lengths
@pytest.mark.parametrize("async_op", [False, True])
def test_all_gather_with_the_input_at_its_own_place(group, length, async_op):
    whole = torch.full((group.size, length), -1.0)
    whole[group.rank] = given(group.rank, torch.float32, (length,))
    work = mpisgd.all_gather_into_tensor(whole, whole[group.rank], group, async_op)
    if work is not None:
        work.wait()
    assert_equal(whole, torch.stack([given(rank, torch.float32, (length,)) for rank in range(group.size)]))


@lengths
@pytest.mark.parametrize("shift", [1, 2])
def test_all_gather_with_the_input_at_another_place(group, length, shift):
    whole = torch.full((group.size, length), -1.0)
    place = whole[(group.rank + shift) % group.size]
    place.copy_(given(group.rank, torch.float32, (length,)))
    mpisgd.all_gather_into_tensor(whole, place, group)
    assert_equal(whole, torch.stack([given(rank, torch.float32, (length,)) for rank in range(group.size)]))


@lengths
def test_all_gather_with_the_input_across_two_places(group, length):
    whole = torch.full((group.size * length,), -1.0)
    start = min(length // 2, group.size * length - length)
    mine = whole[start : start + length]
    mine.copy_(given(group.rank, torch.float32, (length,)))
    mpisgd.all_gather_into_tensor(whole, mine, group)
    assert_equal(whole, torch.cat([given(rank, torch.float32, (length,)) for rank in range(group.size)]))


@lengths
def test_all_gather_where_only_some_ranks_gather_in_place(group, length):
    whole = torch.full((group.size, length), -1.0)
    whole[group.rank] = given(group.rank, torch.float32, (length,))
    mine = whole[group.rank] if group.rank % 2 else whole[group.rank].clone()
    mpisgd.all_gather_into_tensor(whole, mine, group)
    assert_equal(whole, torch.stack([given(rank, torch.float32, (length,)) for rank in range(group.size)]))


@lengths
def test_all_gather_into_slices_of_the_input(group, length):
    whole = torch.full((group.size, length), -1.0)
    whole[0] = given(group.rank, torch.float32, (length,))
    mpisgd.all_gather(list(whole), whole[0], group)
    assert_equal(whole, torch.stack([given(rank, torch.float32, (length,)) for rank in range(group.size)]))


@lengths
@pytest.mark.parametrize("sizes", [False, True])
def test_all_to_all_single_in_place(group, length, sizes):
    mine = torch.cat([given(100 * group.rank + to, torch.float32, (length,)) for to in range(group.size)])
    splits = [length] * group.size if sizes else None
    mpisgd.all_to_all_single(mine, mine, splits, splits, group)
    wanted = [given(100 * source + group.rank, torch.float32, (length,)) for source in range(group.size)]
    assert_equal(mine, torch.cat(wanted))


@lengths
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_reduce_scatter_into_a_slice_of_the_input(group, length, dtype):
    inputs = [given(rank, dtype, (group.size, length)) for rank in range(group.size)]
    for place in (group.rank, 0):
        mine = inputs[group.rank].clone()
        mpisgd.reduce_scatter_tensor(mine[place], mine, group=group)
        assert_near(mine[place], combined(inputs, ReduceOp.SUM)[group.rank])
        mine = inputs[group.rank].clone()
        mpisgd.reduce_scatter(mine[place], list(mine), group=group)
        assert_near(mine[place], combined(inputs, ReduceOp.SUM)[group.rank])


@lengths
def test_gather_and_scatter_in_place(group, length):
    first = group.ranks[0]
    whole = torch.stack([given(10 * group.rank + i, torch.float32, (length,)) for i in range(group.size)])
    mine = whole[-1]
    mpisgd.scatter(mine, list(whole) if group.rank == 0 else None, first, group)
    assert_equal(mine, given(group.rank, torch.float32, (length,)))
    mpisgd.gather(mine, list(whole) if group.rank == 0 else None, first, group)
    if group.rank == 0:
        assert_equal(whole, torch.stack([given(i, torch.float32, (length,)) for i in range(group.size)]))
