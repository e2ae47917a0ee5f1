"""Every collective, for every dtype, op and root, on every kind of group, against a local oracle."""

from __future__ import annotations

import time

import pytest
import torch
from closed_form import DTYPES, assert_equal, assert_near, combined, given, ops_of, supports
from verdicts import raises_everywhere, referee

import mpisgd
from mpisgd import Group, ReduceOp

N = 131  # more than two vectors of bytes, and odd: where MPI changes to vector instructions

# All dtypes in the world; on the other kinds of group two that take different transports through the code.
CASES = [(dtype, "world") for dtype in DTYPES] + [
    (dtype, kind) for dtype in (torch.bfloat16, torch.int64) for kind in ("duplicate", "half", "reversed")
]
every_dtype = pytest.mark.parametrize(("dtype", "group"), CASES, indirect=["group"], ids=str)


def inputs_of(group: Group, dtype: torch.dtype, shape: tuple[int, ...] = (N,)) -> list[torch.Tensor]:
    return [given(rank, dtype, shape) for rank in range(group.size)]


@every_dtype
def test_all_reduce_combines_all_inputs(group, dtype):
    inputs = inputs_of(group, dtype)
    for op in ops_of(dtype):
        mine = inputs[group.rank].clone()
        assert mpisgd.all_reduce(mine, op, group) is None
        assert_near(mine, combined(inputs, op))


@every_dtype
def test_reduce_changes_the_destination_only(group, dtype):
    inputs = inputs_of(group, dtype)
    for dst in group.ranks:
        for op in ops_of(dtype):
            mine = inputs[group.rank].clone()
            mpisgd.reduce(mine, dst, op, group)
            if mpisgd.rank() == dst:
                assert_near(mine, combined(inputs, op))
            else:
                assert_equal(mine, inputs[group.rank])


@every_dtype
def test_reduce_scatter_leaves_each_rank_its_part(group, dtype):
    inputs = inputs_of(group, dtype, (group.size, N))
    for op in ops_of(dtype):
        wanted = combined(inputs, op)[group.rank]
        mine, parts = inputs[group.rank].clone(), list(inputs[group.rank].clone())
        by_list, by_tensor = torch.empty(N, dtype=dtype), torch.empty(N, dtype=dtype)
        mpisgd.reduce_scatter(by_list, parts, op, group)
        mpisgd.reduce_scatter_tensor(by_tensor, mine, op, group)
        assert_near(by_list, wanted)
        assert_near(by_tensor, wanted)
        assert_equal(mine, inputs[group.rank])
        assert_equal(torch.stack(parts), inputs[group.rank])


@every_dtype
def test_broadcast_gives_everyone_the_tensor_of_src(group, dtype):
    for place, src in enumerate(group.ranks):
        mine = given(group.rank, dtype)
        mpisgd.broadcast(mine, src, group)
        assert_equal(mine, given(place, dtype))


@every_dtype
def test_gather_fills_the_list_of_the_destination(group, dtype):
    inputs = inputs_of(group, dtype)
    for dst in group.ranks:
        mine = inputs[group.rank].clone()
        outputs = [torch.zeros(N, dtype=dtype) for _ in group.ranks] if mpisgd.rank() == dst else None
        mpisgd.gather(mine, outputs, dst, group)
        assert_equal(mine, inputs[group.rank])
        for output, wanted in zip(outputs or [], inputs):  # noqa: B905
            assert_equal(output, wanted)


@every_dtype
def test_scatter_hands_out_the_list_of_src(group, dtype):
    for place, src in enumerate(group.ranks):
        pieces = [given(10 * place + rank, dtype) for rank in range(group.size)]
        mine = torch.zeros(N, dtype=dtype)
        mpisgd.scatter(mine, pieces if mpisgd.rank() == src else None, src, group)
        assert_equal(mine, given(10 * place + group.rank, dtype))
        assert_equal(pieces[0], given(10 * place, dtype))


@every_dtype
def test_all_gather_gives_everyone_everything(group, dtype):
    inputs, mine = inputs_of(group, dtype), given(group.rank, dtype)
    outputs = [torch.zeros(N, dtype=dtype) for _ in group.ranks]
    stacked = torch.zeros(group.size, N, dtype=dtype)
    joined = torch.zeros(group.size * N, dtype=dtype)
    mpisgd.all_gather(outputs, mine, group)
    mpisgd.all_gather_into_tensor(stacked, mine, group)
    mpisgd.all_gather_into_tensor(joined, mine, group)
    assert_equal(torch.stack(outputs), torch.stack(inputs))
    assert_equal(stacked, torch.stack(inputs))
    assert_equal(joined, torch.cat(inputs))
    assert_equal(mine, inputs[group.rank])


@every_dtype
def test_all_to_all_is_a_transpose(group, dtype):
    mine = [given(100 * group.rank + to, dtype) for to in range(group.size)]
    wanted = [given(100 * source + group.rank, dtype) for source in range(group.size)]
    outputs = [torch.zeros(N, dtype=dtype) for _ in group.ranks]
    joined = torch.zeros(group.size * N, dtype=dtype)
    mpisgd.all_to_all(outputs, mine, group)
    mpisgd.all_to_all_single(joined, torch.cat(mine), group=group)
    assert_equal(torch.stack(outputs), torch.stack(wanted))
    assert_equal(joined, torch.cat(wanted))
    assert_equal(mine[0], given(100 * group.rank, dtype))


@every_dtype
def test_all_to_all_takes_uneven_pieces(group, dtype):
    """Rank s gives rank r s + 2 r rows, so some give or get nothing."""
    gives = [group.rank + 2 * to for to in range(group.size)]
    takes = [source + 2 * group.rank for source in range(group.size)]
    mine = [given(100 * group.rank + to, dtype, (rows, 3)) for to, rows in enumerate(gives)]
    wanted = [given(100 * source + group.rank, dtype, (rows, 3)) for source, rows in enumerate(takes)]
    joined = torch.zeros(sum(takes), 3, dtype=dtype)
    mpisgd.all_to_all_single(joined, torch.cat(mine), takes, gives, group)
    assert_equal(joined, torch.cat(wanted))
    outputs = [torch.zeros(rows, 3, dtype=dtype) for rows in takes]
    mpisgd.all_to_all(outputs, mine, group)
    for output, piece in zip(outputs, wanted, strict=True):
        assert_equal(output, piece)


@every_dtype
def test_ops_that_the_dtype_lacks_are_refused_before_anything_is_sent(group, dtype):
    for op in (op for op in ReduceOp if not supports(op, dtype)):
        mine = given(group.rank, dtype)
        begun = group.queue.consistency.number
        with raises_everywhere(mpisgd.UnsupportedOp) as caught:
            mpisgd.all_reduce(mine, op, group)
        assert op.name in caught.text
        assert str(dtype) in caught.text
        for call in (
            lambda op=op, mine=mine: mpisgd.reduce(mine, group.ranks[0], op, group),
            lambda op=op, mine=mine: mpisgd.reduce_scatter(mine, [mine] * group.size, op, group),
            lambda op=op, mine=mine: mpisgd.all_reduce_coalesced([mine], op, group),
        ):
            with pytest.raises(mpisgd.UnsupportedOp):
                call()
        assert group.queue.consistency.number == begun
        assert_equal(mine, given(group.rank, dtype))
    mpisgd.barrier(group)


def test_all_reduce_takes_the_ops_of_torch_distributed(group):
    mine = given(group.rank, torch.float64)
    mpisgd.all_reduce(mine, torch.distributed.ReduceOp.AVG, group)
    assert_near(mine, combined(inputs_of(group, torch.float64), ReduceOp.AVG))


@pytest.mark.parametrize(
    "algorithm", ["auto", "mpi", "ring", "halving_doubling", "reduce_broadcast", "all_to_all"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("group", ["world"], indirect=True)
def test_nan_of_any_rank_wins_min_and_max(group, dtype, algorithm):
    """As in torch.maximum; every rank must see it, or they go different ways from here."""
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        for sick in range(group.size):
            mine = torch.tensor([float("nan") if group.rank == sick else group.rank - 1.0, -0.0, 3.0, -7.5])
            mine = mine.to(dtype)
            mpisgd.all_reduce(mine, op, group, algorithm=algorithm)
            assert torch.isnan(mine).tolist() == [True, False, False, False]
            assert mine[1:].tolist() == [0.0, 3.0, -7.5]


def test_nan_of_any_rank_wins_reduce(group):
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        for sick in range(group.size):
            mine = torch.tensor([float("nan") if group.rank == sick else 1.0, float(group.rank)])
            mpisgd.reduce(mine, group.ranks[-1], op, group)
            if mpisgd.rank() == group.ranks[-1]:
                assert torch.isnan(mine).tolist() == [True, False]


@every_dtype
def test_coalesced_equals_one_by_one(group, dtype):
    shapes = [(3,), (2, 2), (), (0,), (5, 1)]
    mine = [given(group.rank + 3 * i, dtype, shape) for i, shape in enumerate(shapes)]
    many, single = [tensor.clone() for tensor in mine], [tensor.clone() for tensor in mine]
    mpisgd.all_reduce_coalesced(many, group=group)
    for tensor in single:
        mpisgd.all_reduce(tensor, group=group)
    for a, b in zip(many, single, strict=True):
        assert_near(a, b)
    for place, src in enumerate(group.ranks):
        many = [tensor.clone() for tensor in mine]
        mpisgd.broadcast_coalesced(many, src, group)
        for i, (tensor, shape) in enumerate(zip(many, shapes, strict=True)):
            assert_equal(tensor, given(place + 3 * i, dtype, shape))


def test_coalesced_takes_mixed_dtypes_and_layouts(group):
    mine = [
        given(group.rank, torch.float32, (4, 6)).t(),
        given(group.rank, torch.int64, (3,)),
        given(group.rank, torch.bfloat16, (5,)),
        given(group.rank, torch.float32, (8,))[::2],
        given(group.rank, torch.bool, (4,)),
    ]
    wanted = [
        combined([given(rank, tensor.dtype, shape) for rank in range(group.size)], ReduceOp.SUM)
        for tensor, shape in zip(mine, [(4, 6), (3,), (5,), (8,), (4,)], strict=True)
    ]
    wanted[0], wanted[3] = wanted[0].t(), wanted[3][::2]
    mpisgd.all_reduce_coalesced(mine, group=group)
    for got, want in zip(mine, wanted, strict=True):
        assert_near(got, want)


@every_dtype
def test_coalesced_gather_and_scatter_equal_one_by_one(group, dtype):
    shapes = [(3,), (0,), (2, 2)]
    mine = [given(group.rank + 3 * i, dtype, shape) for i, shape in enumerate(shapes)]
    outputs = [torch.zeros((group.size, *shape), dtype=dtype) for shape in shapes]
    mpisgd.all_gather_into_tensor_coalesced(outputs, mine, group)
    for i, (output, shape) in enumerate(zip(outputs, shapes, strict=True)):
        assert_equal(output, torch.stack([given(rank + 3 * i, dtype, shape) for rank in range(group.size)]))
    whole = [given(group.rank + i, dtype, (group.size, 4)) for i in range(2)]
    parts = [torch.zeros(4, dtype=dtype) for _ in whole]
    mpisgd.reduce_scatter_tensor_coalesced(parts, whole, group=group)
    for i, part in enumerate(parts):
        inputs = [given(rank + i, dtype, (group.size, 4)) for rank in range(group.size)]
        assert_near(part, combined(inputs, ReduceOp.SUM)[group.rank])


def test_barrier_lets_nobody_through_early(group):
    """Each rank in turn comes late; all others must see that it has been there."""
    for turn in range(mpisgd.size()):
        mpisgd.barrier(group)
        if group.rank == turn % group.size:
            time.sleep(0.02)
        came = time.monotonic()
        mpisgd.barrier(group)
        left = time.monotonic()
        times = referee().allgather((group.ranks, came, left))  # one host, so one clock
        here = [(a, b) for ranks, a, b in times if ranks == group.ranks]
        assert max(a for a, _ in here) <= min(b for _, b in here)
