"""Every bug that was found, and its story."""

from __future__ import annotations

import time

import pytest
import torch
from verdicts import everyone

import mpisgd
from mpisgd import ReduceOp
from mpisgd.job.groups import close_group, open_group
from mpisgd.job.lifecycle import world


def test_blocking_call_after_async_one_on_the_same_strided_tensor():
    # all_reduce copied a strided tensor when it was called, not when its turn came: the result of the
    # broadcast queued before it was lost.
    size = mpisgd.size()
    for _ in range(20):
        x = torch.arange(6.0).reshape(2, 3).t() if mpisgd.rank() == 0 else torch.zeros(2, 3).t()
        work = mpisgd.broadcast(x, 0, async_op=True)
        mpisgd.all_reduce(x)
        work.wait()
        everyone(torch.equal(x, torch.arange(6.0).reshape(2, 3).t() * size), f"{x}")


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("length", [2, 100_000])
def test_all_to_all_with_one_list_as_input_and_output(length, turn):
    # Pieces arrived in memory that was still to be sent; only all_to_all_single looked for overlaps.
    rank, size = mpisgd.rank(), mpisgd.size()
    mine = [torch.full((length,), 10.0 * rank + to) for to in range(size)]
    mpisgd.all_to_all(mine[::turn], mine)
    for source, piece in enumerate(mine[::turn]):
        assert torch.equal(piece, torch.full((length,), 10.0 * source + rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "halving_doubling", "all_to_all"])
def test_tensors_made_in_inference_mode_can_be_reduced(dtype, async_op, algorithm):
    # torch forbids writing to them outside the mode, and the queue's thread never was in it.
    with torch.inference_mode():
        x = torch.arange(8).to(dtype)
        if work := mpisgd.all_reduce(x, async_op=async_op, algorithm=algorithm):
            work.wait()
    mpisgd.all_reduce(x, ReduceOp.MAX, algorithm=algorithm)
    assert torch.equal(x, (torch.arange(8) * mpisgd.size()).to(dtype))
    mpisgd.broadcast(x.t(), 0)
    mpisgd.all_gather([torch.zeros_like(x) for _ in range(mpisgd.size())], x)


def test_inference_mode_inside_leaves_tensors_ordinary():
    # The counterpart: what is reduced stays a tensor that autograd knows.
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    mpisgd.all_reduce(y.t())
    (y * y).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 8.0 * mpisgd.size()))


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
def test_a_rank_may_come_late_to_the_end_of_a_group():
    # The group was taken off the list before its end: nobody saw that the others had come to it, and they
    # were told that they wait for each other for ever.
    group = open_group(world().job, range(mpisgd.size()), name="closed late")
    if mpisgd.rank() == 0:
        time.sleep(7.0)
    close_group(group)
