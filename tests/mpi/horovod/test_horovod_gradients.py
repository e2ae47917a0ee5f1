"""Gradients of the operations, as Horovod defines them: averages where an adjoint would sum."""

from __future__ import annotations

import pytest
import torch
from closed_form import given
from reductions import near
from verdicts import everyone

import mpisgd.horovod as hvd

F64 = torch.float64


def leaf(*shape: int) -> torch.Tensor:
    return given(hvd.rank(), F64, shape).requires_grad_()


def weight(rank: int, *shape: int) -> torch.Tensor:
    """The gradient of a result on one rank: differs by rank and element."""
    return given(rank + 10, F64, shape)


def weights(*shape: int) -> list[torch.Tensor]:
    return [weight(rank, *shape) for rank in range(hvd.size())]


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_allreduce(op):
    x = leaf(3, 2)
    how = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0}
    hvd.allreduce(x, name="with a name", **how).backward(weight(hvd.rank(), 3, 2))
    near(x.grad, sum(weights(3, 2)) * 1.5 / (hvd.size() if op == "Average" else 1))


def test_allreduce_of_a_reduced_tensor_twice_through_the_graph():
    x = leaf(2)
    y = hvd.allreduce(hvd.allreduce(x, op=hvd.Sum) * 2, op=hvd.Sum)
    y.backward(torch.ones(2, dtype=F64))
    assert x.grad.tolist() == [2.0 * hvd.size() ** 2] * 2


def test_grouped_allreduce():
    x, y, without = leaf(3), leaf(2, 2), given(hvd.rank(), F64, (2,))
    reduced = hvd.grouped_allreduce([x, y, without], op=hvd.Sum)
    torch.autograd.backward(reduced[:2], [weight(hvd.rank(), 3), weight(hvd.rank(), 2, 2)])
    near(x.grad, sum(weights(3)))
    near(y.grad, sum(weights(2, 2)))


def test_compression_is_differentiable():
    x = leaf(3)
    hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum).sum().backward()
    assert x.grad.dtype == F64
    assert x.grad.tolist() == [hvd.size()] * 3


def test_allgather_gives_the_average_of_the_own_rows():
    rank, size = hvd.rank(), hvd.size()
    x = leaf(rank + 1, 2)
    total = size * (size + 1) // 2
    hvd.allgather(x).backward(weight(rank, total, 2))
    start = rank * (rank + 1) // 2
    near(x.grad, (sum(weights(total, 2)) / size)[start : start + rank + 1])


def test_grouped_allgather():
    rank, size = hvd.rank(), hvd.size()
    x, y = leaf(2), leaf(1, 3)
    torch.autograd.backward(hvd.grouped_allgather([x, y]), [weight(rank, 2 * size), weight(rank, size, 3)])
    near(x.grad, (sum(weights(2 * size)) / size)[2 * rank : 2 * rank + 2])
    near(y.grad, (sum(weights(size, 3)) / size)[rank : rank + 1])


@pytest.mark.parametrize("last", [False, True])
def test_broadcast_gives_the_average_to_the_root(last):
    root = hvd.size() - 1 if last else 0
    x = leaf(4)
    hvd.broadcast(x, root).backward(weight(hvd.rank(), 4))
    near(x.grad, sum(weights(4)) / hvd.size() * (hvd.rank() == root))


def test_broadcast_of_gradients_that_are_not_finite_leaves_zeros_elsewhere():
    x = leaf(2)
    hvd.broadcast(x, 0).backward(torch.full((2,), torch.inf, dtype=F64))
    everyone(x.grad.tolist() == [torch.inf if hvd.rank() == 0 else 0.0] * 2, f"{x.grad}")


def test_alltoall_sends_the_gradients_back():
    """Two rows of each tensor stay behind and have no gradient."""
    rank, size = hvd.rank(), hvd.size()
    x = leaf(size * (rank + 1) + 2, 2)
    received, counts = hvd.alltoall(x, [rank + 1] * size)
    assert counts.tolist() == [source + 1 for source in range(size)]
    num = size * (size + 1) // 2
    received.backward(weight(rank, num, 2))
    start = rank * (rank + 1) // 2
    back = [weight(to, num, 2)[start : start + rank + 1] for to in range(size)]
    near(x.grad, torch.cat([*back, torch.zeros(2, 2, dtype=F64)]))


def test_alltoall_without_splits():
    rank, size = hvd.rank(), hvd.size()
    x = leaf(size)
    hvd.alltoall(x).backward(weight(rank, size))
    near(x.grad, torch.stack([weight(to, size)[rank] for to in range(size)]))


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_reducescatter_gathers_the_gradients_and_leaves_them_as_they_were(op):
    rank, size = hvd.rank(), hvd.size()
    shares = [len(rows) for rows in torch.arange(7).tensor_split(size)]
    x, grad = leaf(7, 2), weight(rank, shares[rank], 2)
    how = {"op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0}
    hvd.reducescatter(x, **how).backward(grad)
    everyones = torch.cat([weight(r, shares[r], 2) for r in range(size)])
    near(x.grad, everyones * 1.5 * (size if op == "Sum" else 1))
    assert torch.equal(grad, weight(rank, shares[rank], 2))


def test_grouped_reducescatter():
    rank, size = hvd.rank(), hvd.size()
    x, y = leaf(size), leaf(2 * size, 1)
    torch.autograd.backward(hvd.grouped_reducescatter([x, y]), [weight(rank, 1), weight(rank, 2, 1)])
    near(x.grad, torch.cat(weights(1)))
    near(y.grad, torch.cat(weights(2, 1)))


@pytest.mark.parametrize(
    "call", [hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.alltoall, hvd.reducescatter]
)
def test_without_gradients_nothing_is_recorded(call):
    with torch.no_grad():
        assert not call(leaf(2 * hvd.size())).requires_grad
    assert not call(given(hvd.rank(), F64, (2 * hvd.size(),))).requires_grad
