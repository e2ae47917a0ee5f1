"""More bytes than MPI can count: the path is the same with the limits lowered, and once it is real."""

from __future__ import annotations

import resource
import time

import pytest
import torch
from closed_form import assert_equal, assert_near, combined, given

import mpisgd
from mpisgd import ReduceOp

LENGTH = 131


@pytest.fixture(autouse=True)
def low_limits(request, monkeypatch):
    if "big" not in request.keywords:
        from mpisgd.transport.mpi import datatypes

        monkeypatch.setattr(datatypes, "MAX_COUNT", 50)
        monkeypatch.setattr(datatypes, "SPAN_BLOCK", 16)
        monkeypatch.setattr(datatypes, "MAX_REDUCE_COUNT", 10)


# Less than a block, whole blocks, blocks and a rest; as part of a whole that is beyond the limit.
lengths = pytest.mark.parametrize("length", [1, 16, 64, LENGTH])


@lengths
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64], ids=str)
def test_every_collective_with_low_limits(group, dtype, length):
    inputs = [given(rank, dtype, (length,)) for rank in range(group.size)]
    first, here = group.ranks[0], group.rank == 0
    total = combined(inputs, ReduceOp.SUM)
    for algorithm in ("mpi", "ring", "all_to_all"):
        mine = inputs[group.rank].clone()
        mpisgd.all_reduce(mine, group=group, algorithm=algorithm)
        assert_near(mine, total)
    mine = inputs[group.rank].clone()
    mpisgd.reduce(mine, first, group=group)
    assert_near(mine, total if here else inputs[group.rank])
    mine = inputs[group.rank].clone()
    mpisgd.broadcast(mine, group.ranks[-1], group)
    assert_equal(mine, inputs[-1])
    outputs = [torch.zeros(length, dtype=dtype) for _ in inputs]
    mpisgd.gather(inputs[group.rank], outputs if here else None, first, group)
    if here:
        assert_equal(torch.stack(outputs), torch.stack(inputs))
    mpisgd.scatter(mine, inputs if here else None, first, group)
    assert_equal(mine, inputs[group.rank])
    whole = torch.zeros(group.size, length, dtype=dtype)
    mpisgd.all_gather_into_tensor(whole, inputs[group.rank], group)
    assert_equal(whole, torch.stack(inputs))
    whole.zero_()[group.rank] = inputs[group.rank]
    mpisgd.all_gather_into_tensor(whole, whole[group.rank], group)
    assert_equal(whole, torch.stack(inputs))
    mpisgd.reduce_scatter_tensor(mine, torch.cat([inputs[group.rank]] * group.size), group=group)
    assert_near(mine, total)
    mpisgd.all_to_all_single(whole, torch.stack([inputs[group.rank]] * group.size), group=group)
    assert_equal(whole, torch.stack(inputs))
    mpisgd.all_to_all(outputs, [inputs[group.rank]] * group.size, group)
    assert_equal(torch.stack(outputs), torch.stack(inputs))


@lengths
def test_messages_with_low_limits(groups, length):
    group = groups["world"]
    before, after = group.ranks[group.rank - 1], group.ranks[(group.rank + 1) % group.size]
    out = torch.zeros(length)
    work = mpisgd.irecv(out, before)
    mpisgd.isend(given(group.rank, torch.float32, (length,)), after)
    work.wait()
    assert_equal(out, given(before, torch.float32, (length,)))
    mpisgd.isend(torch.ones(length), after)
    short = mpisgd.irecv(torch.zeros(length + 1), before)
    with pytest.raises(mpisgd.ShapeMismatch):
        short.wait()


MORE = 2**31 + 5


@pytest.mark.big
@pytest.mark.mpi(min_size=2)
@pytest.mark.timeout(300)
def test_more_than_two_gibibytes(capsys):
    """Broadcast and all-gather of bytes, all-reduce of float32, each of more than 2**31 bytes."""
    rank, size = mpisgd.rank(), mpisgd.size()
    start = time.monotonic()
    x = torch.full((MORE,), 10 + rank, dtype=torch.uint8)
    x[-1] = 200 + rank
    mpisgd.broadcast(x, 1)
    assert (x[0].item(), x[2**31].item(), x[-1].item()) == (11, 11, 201)
    del x
    piece = MORE // size + 1
    out = torch.zeros(size * piece, dtype=torch.uint8)
    mpisgd.all_gather_into_tensor(out, torch.full((piece,), 1 + rank, dtype=torch.uint8))
    ends = out.view(size, piece)[:, [0, piece // 2, -1]]
    assert ends.tolist() == [[1 + r] * 3 for r in range(size)]
    del out, ends
    y = torch.full((2**29 + 5,), 1.0 + rank)
    mpisgd.all_reduce(y)
    total = size * (size + 1) / 2
    assert y[[0, 2**28, 2**29, -1]].tolist() == [total] * 4
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    with capsys.disabled():
        print(f"rank {rank}: {time.monotonic() - start:.1f} s, peak {peak:.1f} GiB")
