"""All-reduce in each other's memory: every length, and tensors that cannot be reached."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from closed_form import assert_equal, assert_near, combined, given
from verdicts import everyone

import mpisgd
from mpisgd import ReduceOp
from mpisgd.transport.cma.transport import CHUNK_BYTES, CmaTransport

all_reduce = importlib.import_module("mpisgd.collectives.all_reduce")  # `mpisgd` has a function of that name


@pytest.fixture
def group(groups):
    """All ranks."""
    found = groups["world"]
    if all_reduce.transport_named(found, "direct") is None:
        pytest.skip("one rank, several hosts, or ranks that cannot reach each other's memory")
    return found


def reduced(group, length, dtype, op=ReduceOp.SUM, round_=0):
    """All-reduce what differs by rank, element and round, and compare."""
    inputs = [given(rank + round_, dtype, (length,)) for rank in range(group.size)]
    mine = inputs[group.rank].clone()
    mpisgd.all_reduce(mine, op, group, algorithm="direct")
    assert_equal(mine, combined(inputs, op))


LENGTHS = (0, 1, 3, CHUNK_BYTES // 4 - 1, CHUNK_BYTES // 2 + 1, 3 * CHUNK_BYTES // 4 + 7, CHUNK_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.float64], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_of_every_length_are_reduced(group, dtype, length):
    reduced(group, length, dtype)


@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT], ids=str)
def test_every_operation(group, op):
    reduced(group, CHUNK_BYTES // 4 + 5, torch.float64, op)


def test_operations_follow_each_other_without_a_race(group):
    for round_ in range(40):
        if round_ % group.size == group.rank:
            torch.randn(200, 200) @ torch.randn(200, 200)
        reduced(
            group, (17, CHUNK_BYTES // 2, 5 * CHUNK_BYTES // 8 + 5)[round_ % 3], torch.float64, round_=round_
        )


def test_a_tensor_with_gaps_and_an_asynchronous_one(group):
    inputs = [given(rank, torch.float32, (300, 401)) for rank in range(group.size)]
    mine = inputs[group.rank].clone()
    work = mpisgd.all_reduce(mine[:, ::2], group=group, async_op=True, algorithm="direct")
    assert work is not None
    work.wait()
    assert_equal(mine[:, ::2], combined([each[:, ::2] for each in inputs], ReduceOp.SUM))
    assert_equal(mine[:, 1::2], inputs[group.rank][:, 1::2])


def test_where_one_tensor_cannot_be_reached_all_use_the_staging_memory(group, monkeypatch):
    if group.rank == group.size - 1:
        monkeypatch.setattr(CmaTransport, "reachable_address", lambda self, flat: 0)
    monkeypatch.setattr(CmaTransport, "combine", None)  # would raise
    for round_, length in enumerate((5, CHUNK_BYTES)):
        reduced(group, length, torch.float32, round_=round_)


@pytest.mark.parametrize("switch", ["MPISGD_CROSS_MEMORY", "MPISGD_SHARED_MEMORY"])
def test_one_rank_that_does_not_want_it_keeps_all_from_it(group, monkeypatch, switch):
    if group.rank == 0:
        monkeypatch.setenv(switch, "0")
    without = mpisgd.new_group()
    inputs = [given(rank, torch.float32, (CHUNK_BYTES,)) for rank in range(group.size)]
    mine = inputs[group.rank].clone()
    mpisgd.all_reduce(mine, group=without)
    assert_near(mine, combined(inputs, ReduceOp.SUM))  # MPI adds in an order of its own


@pytest.mark.parametrize(
    ("switch", "names", "used"),
    [
        ("MPISGD_CROSS_MEMORY", ["direct"], "algorithm=node"),
        ("MPISGD_SHARED_MEMORY", ["node", "direct", "hierarchical"], "algorithm=mpi"),
    ],
)
def test_an_algorithm_that_cannot_be_had_falls_back_with_one_warning(group, monkeypatch, switch, names, used):
    monkeypatch.setenv(switch, "0")
    monkeypatch.setattr(all_reduce, "_warned", set())
    without = mpisgd.new_group()
    for name in names:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for numel in (3, 4):
                mine = torch.full((numel,), 1.0)
                mpisgd.all_reduce(mine, group=without, algorithm=name)
                everyone(mine.tolist() == [group.size] * numel)
        texts = [str(one.message) for one in seen]
        everyone(len(texts) == (group.rank == 0), f"{texts}")
        everyone(all(f"algorithm='{name}' needs" in text for text in texts), f"{texts}")
    operations = {known.operation.extra for known in without.known_calls.values()}
    everyone(operations == {used}, f"{operations}")
