"""The algorithms of all_reduce: equal to each other, the same bits everywhere, the cost they claim."""

from __future__ import annotations

import zlib

import pytest
import torch
from closed_form import assert_equal, assert_near, combined, given, ops_of
from ranks_as_threads import PerRank
from verdicts import same_on_all_ranks

import mpisgd
from mpisgd import ReduceOp
from mpisgd.collectives.all_reduce import choose_algorithm

ON_ONE_HOST = ["mpi", "node", "direct"]
NAMES = [*ON_ONE_HOST, "hierarchical", "ring", "halving_doubling", "reduce_broadcast", "all_to_all"]
algorithms = pytest.mark.parametrize("algorithm", NAMES)

# Where ranks share no memory, the names of its algorithms fall back; test_cma.py looks at the warning.
pytestmark = pytest.mark.filterwarnings("ignore:all_reduce in group:RuntimeWarning")


@pytest.fixture(scope="module")
def alone(job, request) -> mpisgd.Group | PerRank:
    """A group of this rank."""

    def make() -> mpisgd.Group:
        return [mpisgd.new_group([rank]) for rank in range(mpisgd.size())][mpisgd.rank()]

    return PerRank(make) if request.config.getoption("--threads") else make()


def sizes(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n, n + 1, 1000, 2**16 + 1})


@algorithms
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint64, torch.bool], ids=str)
def test_integers_are_exact(algorithm, dtype):
    n = mpisgd.size()
    for op in ops_of(dtype):
        for length in (0, 1, n + 1, 1000):
            inputs = [given(rank, dtype, (length,)) for rank in range(n)]
            mine = inputs[mpisgd.rank()].clone()
            mpisgd.all_reduce(mine, op, algorithm=algorithm)
            assert_equal(mine, combined(inputs, op))


@algorithms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_floats_are_right_to_rounding_and_the_same_bits_everywhere(algorithm, dtype):
    n = mpisgd.size()
    for length in sizes(n):
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            inputs = [given(rank, dtype, (length,)) for rank in range(n)]
            mine = inputs[mpisgd.rank()].clone()
            mpisgd.all_reduce(mine, op, algorithm=algorithm)
            wanted = combined(inputs, op)
            slack = n * torch.finfo(dtype).eps * sum((tensor.abs() for tensor in inputs), torch.zeros(1))
            assert bool(((mine - wanted).abs() <= slack).all())
            same_on_all_ranks(zlib.crc32(mine.numpy().tobytes()))


@algorithms
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_rounded_once_and_the_same_bits_everywhere(algorithm, dtype):
    """The float32 sums of different orders are nearly the same, so the rounded ones are one step apart."""
    n = mpisgd.size()
    for length in (n + 1, 1000):
        inputs = [given(rank, dtype, (length,)) for rank in range(n)]
        mine = inputs[mpisgd.rank()].clone()
        mpisgd.all_reduce(mine, ReduceOp.AVG, algorithm=algorithm)
        wanted = combined(inputs, ReduceOp.AVG)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(mine, wanted, rtol=eps, atol=eps / 100)
        if algorithm == "all_to_all":
            assert_equal(mine, wanted)
        same_on_all_ranks(mine.tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_auto_sums_halves_in_rank_order(dtype):
    inputs = [given(rank, dtype, (1000,)) for rank in range(mpisgd.size())]
    mine = inputs[mpisgd.rank()].clone()
    mpisgd.all_reduce(mine)
    assert_equal(mine, combined(inputs, ReduceOp.SUM))


@algorithms
def test_every_kind_of_group(group, algorithm):
    inputs = [given(rank, torch.float64, (1000,)) for rank in range(group.size)]
    mine = inputs[group.rank].clone()
    mpisgd.all_reduce(mine, ReduceOp.MAX, group, algorithm=algorithm)
    assert_near(mine, combined(inputs, ReduceOp.MAX))


@algorithms
def test_no_name_fails_because_of_the_shape_of_the_group(algorithm, groups, alone):
    """On one rank every algorithm is the identity; `hierarchical` on one host is `node`."""
    world = groups["world"]
    mine = given(mpisgd.rank(), torch.float32, (100,))
    before = mine.clone()
    mpisgd.all_reduce(mine, ReduceOp.AVG, alone, algorithm=algorithm)
    assert_equal(mine, before)
    chosen = choose_algorithm(world, algorithm, mine)
    if algorithm == "hierarchical" and world.shared_memory is not None:
        assert chosen == "node"


def claimed(algorithm: str, rank: int, size: int, n: int) -> tuple[int, int]:
    """(elements, messages) that `rank` sends, by the docstrings; n is divisible by whatever is needed."""
    if size == 1 or algorithm in ON_ONE_HOST:
        return 0, 0
    if algorithm in ("ring", "all_to_all"):
        return 2 * (size - 1) * n // size, 2 * (size - 1)
    if algorithm == "reduce_broadcast":
        children = sum(
            1
            for k in range(size.bit_length())
            if rank % (2 << k) == 0 and rank + (1 << k) < size and (rank == 0 or rank & -rank > 1 << k)
        )
        messages = children + (rank != 0)
        return messages * n, messages
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    if rank >= power:
        return n, 1
    served = rank < extra
    return 2 * (power - 1) * n // power + served * n, 2 * (power.bit_length() - 1) + served


@algorithms
@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float64, 8), (torch.bfloat16, None)], ids=str)
def test_the_cost_is_what_the_docstring_says(algorithm, dtype, itemsize, groups):
    """Counted where mpi4py is called. Agreeing on the operation is not payload and not in it."""
    communicator, n = groups["world"].queue.communicator, 64 * mpisgd.size()
    before, calls = (communicator.sent_bytes, communicator.sent_messages), communicator.calls["Allreduce"]
    mpisgd.all_reduce(given(mpisgd.rank(), dtype, (n,)), algorithm=algorithm)
    sent = (communicator.sent_bytes - before[0], communicator.sent_messages - before[1])
    chosen = choose_algorithm(groups["world"], algorithm, torch.zeros(n, dtype=dtype))
    elements, messages = claimed(chosen, communicator.rank, communicator.size, n)
    itemsize = itemsize or (2 if chosen == "all_to_all" else 4)  # halves travel, or float32
    assert sent == (elements * itemsize, messages)
    assert communicator.calls["Allreduce"] - calls == (chosen == "mpi")


def test_agreeing_on_an_operation_is_not_counted(groups):
    communicator = groups["world"].queue.communicator
    before = (communicator.sent_bytes, communicator.sent_messages)
    mpisgd.barrier()
    assert (communicator.sent_bytes, communicator.sent_messages) == before


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(mpisgd.InvalidArgument, match="halving_doubling"):
        mpisgd.all_reduce(torch.zeros(1), algorithm="fastest")
    mpisgd.barrier()
