"""Ranks that call different things: every rank learns it, who did what and where, and all can go on."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import ReduceOp

pytestmark = pytest.mark.mpi(min_size=2)


def x(n: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def blanks(n: int = 6) -> list[torch.Tensor]:
    return [x(n) for _ in range(mpisgd.size())]


# What rank 0 calls, what the others call, and words of either that the error must hold.
CASES: dict[str, tuple[Callable[[], object], Callable[[], object], list[str]]] = {
    "swapped calls": (
        lambda: (mpisgd.all_reduce(x()), mpisgd.broadcast(x(), 0)),
        lambda: (mpisgd.broadcast(x(), 0), mpisgd.all_reduce(x())),
        ["all_reduce", "broadcast"],
    ),
    "shape": (lambda: mpisgd.all_reduce(x(1000)), lambda: mpisgd.all_reduce(x(1024)), ["[1000]", "[1024]"]),
    "shape, equal size": (
        lambda: mpisgd.all_reduce(x(6).view(2, 3)),
        lambda: mpisgd.all_reduce(x(6).view(3, 2)),
        ["[2, 3]", "[3, 2]"],
    ),
    "dtype": (
        lambda: mpisgd.all_reduce(x(6, torch.float32)),
        lambda: mpisgd.all_reduce(x(6, torch.int32)),
        ["float32", "int32"],
    ),
    "op": (
        lambda: mpisgd.all_reduce(x(), ReduceOp.SUM),
        lambda: mpisgd.all_reduce(x(), ReduceOp.AVG),
        ["op=SUM", "op=AVG"],
    ),
    "algorithm": (
        lambda: mpisgd.all_reduce(x(), algorithm="ring"),
        lambda: mpisgd.all_reduce(x(), algorithm="all_to_all"),
        ["ring", "all_to_all"],
    ),
    "root of broadcast": (
        lambda: mpisgd.broadcast(x(), 0),
        lambda: mpisgd.broadcast(x(), 1),
        ["root=0", "root=1"],
    ),
    "root of reduce": (lambda: mpisgd.reduce(x(), 1), lambda: mpisgd.reduce(x(), 0), ["root=0", "root=1"]),
    "all_gather": (
        lambda: mpisgd.all_gather(blanks(5), x(5)),
        lambda: mpisgd.all_gather(blanks(6), x(6)),
        ["[5]", "[6]"],
    ),
    "reduce_scatter": (
        lambda: mpisgd.reduce_scatter(x(5), blanks(5)),
        lambda: mpisgd.reduce_scatter(x(6), blanks(6)),
        ["[5]", "[6]"],
    ),
    "gather": (
        lambda: mpisgd.gather(x(5), blanks(5), 0),
        lambda: mpisgd.gather(x(6), None, 0),
        ["[5]", "[6]"],
    ),
    "scatter": (
        lambda: mpisgd.scatter(x(5), blanks(5), 0),
        lambda: mpisgd.scatter(x(6), None, 0),
        ["[5]", "[6]"],
    ),
    "all_to_all": (
        lambda: mpisgd.all_to_all(blanks(5), blanks(6)),
        lambda: mpisgd.all_to_all(blanks(6), blanks(6)),
        ["sends 6", "expects 5"],
    ),
    "all_to_all dtype": (
        lambda: mpisgd.all_to_all(blanks(), blanks()),
        lambda: mpisgd.all_to_all([t.int() for t in blanks()], [t.int() for t in blanks()]),
        ["float32", "int32"],
    ),
    "all_to_all_single with and without sizes": (
        lambda: mpisgd.all_to_all_single(x(12), x(12)),
        lambda: mpisgd.all_to_all_single(
            x(12), x(12), [12 // mpisgd.size()] * mpisgd.size(), [12 // mpisgd.size()] * mpisgd.size()
        ),
        ["with split sizes"],
    ),
    "coalesced": (
        lambda: mpisgd.all_reduce_coalesced([x(2), x(3)]),
        lambda: mpisgd.all_reduce_coalesced([x(3), x(2)]),
        ["float32[2] float32[3]", "float32[3] float32[2]"],
    ),
    "number of coalesced": (
        lambda: mpisgd.broadcast_coalesced([x(2), x(3)], 0),
        lambda: mpisgd.broadcast_coalesced([x(2)], 0),
        ["float32[2] float32[3]"],
    ),
    "object against tensor": (
        lambda: mpisgd.broadcast_object("a", 0),
        lambda: mpisgd.broadcast(x(), 0),
        ["broadcast_object", "broadcast(op"],
    ),
    "barrier against all_reduce": (
        lambda: mpisgd.barrier(),
        lambda: mpisgd.all_reduce(x()),
        ["barrier", "all_reduce"],
    ),
    "new_group": (
        lambda: mpisgd.new_group([0]),
        lambda: mpisgd.new_group([0, 1]),
        ["ranks=[0]", "ranks=[0, 1]"],
    ),
    "order of new_group's ranks": (
        lambda: mpisgd.new_group([1, 0]),
        lambda: mpisgd.new_group([0, 1]),
        ["ranks=[1, 0]", "ranks=[0, 1]"],
    ),
    "objects' root": (
        lambda: mpisgd.broadcast_object(1, 0),
        lambda: mpisgd.broadcast_object(1, 1),
        ["root=0", "root=1"],
    ),
}
CASES["object against tensor"][2][1] = "broadcast(dtype"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("odd_one", [0, -1], ids=["first", "last"])
def test_every_rank_raises_and_all_go_on(case, odd_one):
    one, others, words = CASES[case]
    if "root" in case or case in ("gather", "scatter"):
        odd_one = 0  # these have the list on rank 0
    odd = mpisgd.rank() == odd_one % mpisgd.size()
    if case == "all_to_all_single with and without sizes" and 12 % mpisgd.size():
        pytest.skip("12 rows for all")
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        one() if odd else others()
    missing = [word for word in words if word not in caught.text]
    everyone(not missing, f"{missing} not in {caught.text}")
    if not case.startswith("all_to_all") or "sizes" in case or "dtype" in case:
        everyone("test_consistency.py" in caught.text, caught.text)
        everyone(re.search(r"ranks? 0\b", caught.text) is not None, caught.text)
    total = x()
    mpisgd.all_reduce(total)
    everyone(torch.equal(total, x() * mpisgd.size()), f"{total}")


def test_tensors_are_unchanged_by_a_disagreement():
    mine = torch.arange(4.0) + mpisgd.rank()
    with raises_everywhere(mpisgd.CollectiveMismatch):
        if mpisgd.rank() == 0:
            mpisgd.all_reduce(mine)
        else:
            mpisgd.broadcast(mine, 0)
    assert torch.equal(mine, torch.arange(4.0) + mpisgd.rank())


def test_calls_that_were_repeated_are_compared_like_the_first():
    """Nothing is left out of the comparison of a call whose form is known; the error has its own line."""
    mine, odd = x() + mpisgd.rank(), mpisgd.rank() == 0
    for _ in range(3):
        mpisgd.all_reduce(mine.clone())
        mpisgd.all_reduce(mine.clone(), "avg")
        mpisgd.broadcast(mine.clone(), 0)
        mpisgd.broadcast(mine.clone(), 1)
    for one, others, words in (
        (lambda: mpisgd.all_reduce(mine), lambda: mpisgd.all_reduce(mine, "avg"), ["op=SUM", "op=AVG"]),
        (lambda: mpisgd.broadcast(mine, 1), lambda: mpisgd.broadcast(mine, 0), ["root=1", "root=0"]),
        (lambda: mpisgd.barrier(), lambda: mpisgd.all_reduce(mine), ["barrier", "all_reduce"]),
    ):
        with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
            one() if odd else others()
        found = [f"test_consistency.py:{call.__code__.co_firstlineno} in <lambda>" for call in (one, others)]
        missing = [word for word in (*words, *found) if word not in caught.text]
        everyone(not missing, f"{missing} not in {caught.text}")
        everyone(torch.equal(mine, x() + mpisgd.rank()), f"{mine}")
    mpisgd.barrier()


def test_a_rank_that_skips_a_call_is_found_at_the_next_one():
    """Everyone is in all_reduce, but not in the same one: the history differs, not the call."""
    if mpisgd.rank() == 0:
        with pytest.raises(mpisgd.CollectiveMismatch, match="operation"):
            mpisgd.barrier()
        mpisgd.all_reduce(x())
    else:
        with pytest.raises(mpisgd.CollectiveMismatch, match="operation"):
            mpisgd.all_reduce(x())
        mpisgd.all_reduce(x())


def test_disagreement_in_a_part_of_the_job_stays_there(groups):
    half = groups["half"]
    if half.ranks[0] == 0 and half.size > 1:
        with pytest.raises(mpisgd.CollectiveMismatch):
            mpisgd.all_reduce(x(3 + half.rank), group=half)
    else:
        mpisgd.all_reduce(x(), group=half)
    mpisgd.barrier(half)
    mpisgd.barrier()


def test_asynchronous_calls_are_compared_too(groups):
    group = groups["duplicate"]
    works = [
        mpisgd.all_reduce(x(), group=group, async_op=True),
        mpisgd.all_reduce(x(3 + group.rank), group=group, async_op=True),
        mpisgd.all_reduce(x(), group=group, async_op=True),
    ]
    works[0].wait()
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        works[1].wait()
    everyone("test_consistency.py" in caught.text, caught.text)
    works[2].wait()
