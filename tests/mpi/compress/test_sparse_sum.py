"""The three routes of a sparse sum: the same bits by each, the bytes that they say, the shortest taken."""

from __future__ import annotations

import pytest
import torch
from verdicts import everyone, same_on_all_ranks

import mpisgd
from mpisgd import ReduceOp, config
from mpisgd.compress.sparse_sum import SparseSum
from mpisgd.core.consistency import Operation

NUMEL = 997
ROUTES = ("gather", "owners", "dense")

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(params=[True, False], ids=["shared memory", "messages"])
def group(monkeypatch, request):
    """All ranks, with or without shared memory."""
    if not request.param:
        monkeypatch.setattr(config, "shared_memory", lambda: False)
    return mpisgd.new_group()


def elements(rank: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices, many of which several ranks have, and values."""
    draw = torch.Generator().manual_seed(1000 * rank + count)
    indices = torch.randperm(NUMEL if rank % 2 else NUMEL // 2, generator=draw)[:count]
    return indices, torch.randn(count, generator=draw, dtype=dtype)


def summed(group, route, counts, dtype, op=ReduceOp.SUM) -> tuple[torch.Tensor, int, int]:
    """What a route gives, how many bytes it says it has sent, and how many were given to mpi4py."""
    summing, out = SparseSum(NUMEL, dtype), torch.full((NUMEL,), 7.0, dtype=dtype)
    summing.route = lambda total, size: route
    indices, values = elements(group.rank, counts[group.rank], dtype)
    communicator, said = group.queue.communicator, []
    sent, given = communicator.sent_bytes, dict(communicator.given_bytes)
    group.queue.run(
        Operation("a sum"), lambda: said.append(summing.reduce(out, indices, values, counts, group, op))
    )
    extra = {name: count - given.get(name, 0) for name, count in communicator.given_bytes.items()}
    size = group.size
    wire = communicator.sent_bytes - sent + (size - 1) * extra.get("Allgather", 0)
    return out, said[0], wire + 2 * (size - 1) * extra.get("Allreduce", 0) // size


def expected(counts, dtype) -> torch.Tensor:
    total = torch.zeros(NUMEL, dtype=dtype)
    for rank, count in enumerate(counts):
        for index, value in zip(*elements(rank, count, dtype), strict=True):
            total[index] += value
    return total


COUNTS = {
    "equal": lambda size: [60] * size,
    "ragged": lambda size: [17 * rank for rank in range(size)],
    "none": lambda size: [0] * size,
    "many": lambda size: [NUMEL // 2] * size,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("route", ROUTES)
def test_routes_give_the_same_sums(group, route, dtype):
    for name, make in COUNTS.items():
        counts = make(group.size)
        out, said, wire = summed(group, route, counts, dtype)
        exact = torch.equal(out, expected(counts, dtype))
        close = torch.allclose(out, expected(counts, dtype), rtol=1e-5)
        everyone(close if route == "dense" else exact, f"{name}: not the sum of all elements")
        same_on_all_ranks(out.tolist())
        everyone(group.shared_memory is not None or said == wire, f"{name}: says {said} bytes, sent {wire}")


def test_the_mean_is_the_sum_divided(group):
    counts = [50] * group.size
    for route in ROUTES:
        total, *_ = summed(group, route, counts, torch.float64)
        mean, *_ = summed(group, route, counts, torch.float64, ReduceOp.AVG)
        everyone(torch.allclose(mean, total / group.size, rtol=1e-14))


def test_the_route_is_the_one_that_sends_least(group):
    """Few elements are gathered, the many of many ranks have owners, half and more travel as they are."""
    routes = {
        (ratio, size): SparseSum(10**6, torch.float32).route(round(10**6 * ratio) * size, size)
        for ratio in (0.001, 0.3, 1.0)
        for size in (2, 4, 64)
    }
    assert {size: routes[0.001, size] for size in (2, 4, 64)} == dict.fromkeys((2, 4, 64), "gather")
    assert {size: routes[0.3, size] for size in (2, 4, 64)} == {2: "gather", 4: "owners", 64: "owners"}
    assert {size: routes[1.0, size] for size in (2, 4, 64)} == dict.fromkeys((2, 4, 64), "dense")
