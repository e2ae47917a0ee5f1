"""The shared memory of a host: who has it, what lies in it, and that it is gone afterwards."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from closed_form import assert_equal, combined, given
from verdicts import everyone

import mpisgd
from mpisgd import ReduceOp
from mpisgd.core.consistency import Operation
from mpisgd.memory_ranges import range_of
from mpisgd.transport import staging_layout
from mpisgd.transport.shm.at_once import AT_ONCE_BYTES
from mpisgd.transport.staging_layout import BUFFER_BYTES, slot_bytes
from mpisgd.transport.torch_reduction import combine_in_rank_order


@pytest.fixture
def shm(groups):
    """The world's shared memory."""
    found = groups["world"].shared_memory
    if found is None:
        pytest.skip("one rank, several hosts, or MPISGD_SHARED_MEMORY=0")
    return found


def run(group, action):
    group.queue.run(Operation("test"), action)


FULL = BUFFER_BYTES // 4
LENGTHS = (0, 1, 3, FULL - 1, FULL, FULL + 1, 3 * FULL + 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_of_every_length_are_reduced(shm, dtype, length):
    inputs = [given(rank, dtype, (length,)) for rank in range(mpisgd.size())]
    mine = inputs[mpisgd.rank()].clone()
    mpisgd.all_reduce(mine, algorithm="node")
    assert_equal(mine, combined(inputs, ReduceOp.SUM))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT], ids=str)
def test_a_region_is_reduced_where_it_lies(shm, groups, op):
    length, group = 100_003, groups["world"]
    made = []
    run(group, lambda: made.append(shm.open_region(length, torch.float64)))
    (region,) = made
    for round_ in range(3):
        inputs = [given(rank + round_, torch.float64, (length,)) for rank in range(group.size)]
        region.mine.copy_(inputs[group.rank])
        run(group, lambda: group.transports[0].all_reduce_now(region.mine, op, region))
        assert_equal(region.mine, combined(inputs, op))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_owner_gets_the_sum_of_its_own(shm, groups, monkeypatch, dtype, op, in_place):
    """Lists of all lengths, one rank with most of them, one with none: bit for bit in rank order."""
    group = groups["world"]
    monkeypatch.setattr(staging_layout, "BUFFER_BYTES", 128 * group.size)
    most = slot_bytes(group.size) // dtype.itemsize
    lengths = [most, 1, 15, 16, most, 7, 0, 3, 5, most - 1]
    owners = [0, 0, 1, 0, 0, 1, 0, group.size - 1, 0, 0]
    for round_ in range(3):
        given_ = [
            [given(rank + round_ + i, dtype, (length,)) for i, length in enumerate(lengths)]
            for rank in range(group.size)
        ]
        mine = [tensor.clone() for tensor in given_[group.rank]]
        chunks = [[mine[i] for i, owner in enumerate(owners) if owner == rank] for rank in range(group.size)]
        out = chunks[group.rank] if in_place else [chunk.clone().zero_() for chunk in chunks[group.rank]]

        def combine(k, everyones, out=out):
            combine_in_rank_order(everyones, op, out=out[k])

        own, ranges = chunks[group.rank], [[range_of(chunk) for chunk in of_one] for of_one in chunks]
        steps = shm.reduce_to_owners(ranges, own, combine, in_place=in_place)
        run(group, lambda steps=steps: shm.run_steps(steps))
        wanted = [
            combined([tensors[i] for tensors in given_], op)
            for i, owner in enumerate(owners)
            if owner == group.rank
        ]
        for got, want in zip(out, wanted, strict=True):
            assert_equal(got, want)
        for i, owner in enumerate(owners):
            if owner != group.rank or not in_place:
                assert_equal(mine[i], given_[group.rank][i])


def test_operations_follow_each_other_without_a_race(shm):
    """A fast rank must not overwrite what a slow one still reads: many sizes, no pause, late ranks."""

    @functools.cache  # to make them takes longer than the operation
    def inputs_of(length: int, turn: int) -> list[torch.Tensor]:
        return [given(rank + turn, torch.float64, (length,)) for rank in range(mpisgd.size())]

    for round_ in range(60):
        inputs = inputs_of((17, AT_ONCE_BYTES, BUFFER_BYTES // 8 + 5)[round_ % 3], round_ // 3 % 4)
        mine = inputs[mpisgd.rank()].clone()
        if round_ % mpisgd.size() == mpisgd.rank():
            torch.randn(200, 200) @ torch.randn(200, 200)
        mpisgd.all_reduce(mine, algorithm="node")
        assert_equal(mine, combined(inputs, ReduceOp.SUM))


def test_the_memory_has_no_name(shm):
    everyone(not any("mpisgd" in name for name in os.listdir("/dev/shm")), "a name in /dev/shm")
