"""Collectives that return their result, as DTensor uses them, and those with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as nnf
from closed_form import assert_equal, given
from torch import Tensor

# torch deprecates most of these in favour of one another.
pytestmark = pytest.mark.filterwarnings(r"ignore:`?torch.distributed\..*deprecated:FutureWarning")
F64 = torch.float64
TOLERANCE = 1e-13  # in float64; the largest of 1 to 4 ranks was 3.6e-15


def inputs_of(pg: dist.ProcessGroup) -> list[Tensor]:
    """One per rank, its first dimension the group's size."""
    return [given(rank, F64, (pg.size(), 3)).requires_grad_() for rank in range(pg.size())]


def total(xs: Sequence[Tensor]) -> list[Tensor]:
    return [sum(xs)] * len(xs)


def gathered(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(list(xs))] * len(xs)


def scattered(xs: Sequence[Tensor]) -> list[Tensor]:
    return list(sum(xs).split(1))


def transposed(xs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([x[rank : rank + 1] for x in xs]) for rank in range(len(xs))]


def rotated(xs: Sequence[Tensor]) -> list[Tensor]:
    return [xs[rank - 1] for rank in range(len(xs))]


# What one process computes for all ranks at once, and the call whose result is this rank's part of that.
Case = tuple[Callable[[Sequence[Tensor]], list[Tensor]], Callable[[Tensor, dist.ProcessGroup], Tensor]]
FUNCTIONAL: dict[str, Case] = {
    "all_reduce": (total, lambda x, pg: funcol.all_reduce(x, "sum", pg)),
    "all_reduce avg": (
        lambda xs: [sum(xs) / len(xs)] * len(xs),
        lambda x, pg: funcol.all_reduce(x, "avg", pg),
    ),
    "all_gather": (gathered, lambda x, pg: funcol.all_gather_tensor(x, 0, pg)),
    "reduce_scatter": (scattered, lambda x, pg: funcol.reduce_scatter_tensor(x, "sum", 0, pg)),
    "all_to_all": (transposed, lambda x, pg: funcol.all_to_all_single(x, None, None, pg)),
    "broadcast": (lambda xs: [xs[0]] * len(xs), lambda x, pg: funcol.broadcast(x, 0, pg)),
    "permute": (
        rotated,
        lambda x, pg: funcol.permute_tensor(x.flatten(), [*range(1, pg.size()), 0], pg).view(x.shape),
    ),
}
# Not among them: nn's private _all_gather_base, whose backward torch has for NCCL and XCCL only.
WITH_GRADIENTS: dict[str, Case] = {
    "funcol all_gather": (gathered, lambda x, pg: funcol.all_gather_tensor_autograd(x, 0, pg)),
    "funcol reduce_scatter": (
        scattered,
        lambda x, pg: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, pg),
    ),
    "funcol all_to_all": (
        transposed,
        lambda x, pg: funcol.all_to_all_single_autograd(x, [1] * pg.size(), [1] * pg.size(), pg),
    ),
    "nn all_reduce": (total, lambda x, pg: nnf.all_reduce(x, group=pg)),
    "nn all_gather": (gathered, lambda x, pg: torch.cat(nnf.all_gather(x, pg))),
    "nn reduce_scatter": (
        scattered,
        lambda x, pg: nnf.reduce_scatter(torch.zeros(1, 3, dtype=F64), list(x.split(1)), group=pg),
    ),
    "nn all_to_all": (
        transposed,
        lambda x, pg: torch.cat(nnf.all_to_all(list(torch.zeros_like(x).split(1)), list(x.split(1)), pg)),
    ),
    "nn all_to_all_single": (
        transposed,
        lambda x, pg: nnf.all_to_all_single(torch.zeros_like(x), x, group=pg),
    ),
}
# The root is a rank of the group to one half of torch's own code and of the job to the other: default group.
WITH_ROOT: dict[str, Case] = {
    "nn broadcast": (lambda xs: [xs[-1]] * len(xs), lambda x, pg: nnf.broadcast(x, pg.size() - 1, pg)),
    "nn reduce": (
        lambda xs: [sum(xs) if rank == 0 else xs[rank] * 0 for rank in range(len(xs))],
        lambda x, pg: nnf.reduce(x, 0, group=pg) if pg.rank() == 0 else nnf.reduce(x, 0, group=pg) * 0,
    ),
    "nn gather": (
        lambda xs: [torch.cat(list(xs)) * (rank == 0) for rank in range(len(xs))],
        lambda x, pg: torch.cat(nnf.gather(x, 0, pg)) * (pg.rank() == 0),
    ),
    "nn scatter": (
        lambda xs: list(xs[0].split(1)),
        lambda x, pg: nnf.scatter(list(x.split(1)), 0, pg),
    ),
}


def difference(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return (got - wanted).abs().max().item()


def check_gradients(case: Case, pg: dist.ProcessGroup) -> None:
    """Loss: every rank's result times numbers of its own, summed over the ranks."""
    oracle, call = case
    inputs = inputs_of(pg)
    wanted = oracle(inputs)
    weights = [given(50 + rank, F64, tuple(out.shape)) for rank, out in enumerate(wanted)]
    sum((out * weight).sum() for out, weight in zip(wanted, weights, strict=True)).backward()
    mine = inputs[pg.rank()].detach().clone().requires_grad_()
    got = call(mine, pg)
    (got * weights[pg.rank()]).sum().backward()
    gradient = inputs[pg.rank()].grad  # None where no rank's result depends on this rank's input
    gradient = torch.zeros_like(mine) if gradient is None else gradient
    largest = max(difference(got, wanted[pg.rank()]), difference(mine.grad, gradient))
    print(f"max difference {largest:.1e}")
    assert largest < TOLERANCE


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives_leave_their_input_alone(pg, name):
    oracle, call = FUNCTIONAL[name]
    with torch.no_grad():
        inputs = [x.detach() for x in inputs_of(pg)]
        mine = inputs[pg.rank()].clone()
        got = call(mine, pg)
        assert difference(got, oracle(inputs)[pg.rank()]) < TOLERANCE
        assert_equal(mine, inputs[pg.rank()])


def test_functional_coalesced_collectives(pg):
    inputs = [x.detach() for x in inputs_of(pg)]
    mine = [inputs[pg.rank()], inputs[pg.rank()] * 2]
    for i, got in enumerate(funcol.all_reduce_coalesced(mine, "sum", pg)):
        assert difference(got, total(inputs)[0] * (i + 1)) < TOLERANCE
    for i, got in enumerate(funcol.all_gather_into_tensor_coalesced(mine, pg)):
        assert difference(got, gathered(inputs)[0] * (i + 1)) < TOLERANCE
    for i, got in enumerate(funcol.reduce_scatter_tensor_coalesced(mine, "sum", [0, 0], pg)):
        assert difference(got, scattered(inputs)[pg.rank()] * (i + 1)) < TOLERANCE


def test_results_are_waited_for_where_they_are_used(pg):
    """A result stands for a collective under way until something reads it."""
    results = [funcol.all_reduce(torch.full((1000,), float(i), dtype=F64), "sum", pg) for i in range(20)]
    for i, result in enumerate(results):
        assert_equal(funcol.wait_tensor(result + 0), torch.full((1000,), float(i * pg.size()), dtype=F64))


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_of_collectives_equal_one_process(pg, name):
    check_gradients(WITH_GRADIENTS[name], pg)


@pytest.mark.parametrize("name", WITH_ROOT)
def test_gradients_of_collectives_with_a_root_equal_one_process(process_groups, name):
    check_gradients(WITH_ROOT[name], process_groups["default"])
