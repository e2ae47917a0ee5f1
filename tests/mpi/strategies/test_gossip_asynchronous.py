"""`Gossip(style="asynchronous")`: what holds whoever has met whom, and how it ends."""

from __future__ import annotations

import time

import pytest
import torch
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import Compression, Gossip
from mpisgd.errors import InvalidArgument

MAX_STEPS = 10_000


def params_of(rank: int) -> list[torch.Tensor]:
    """Of two dtypes, different for every rank and element."""
    wide = torch.sin(torch.arange(2000, dtype=torch.float64) + 7 * rank).view(40, 50)
    return [wide, torch.cos(torch.arange(3, dtype=torch.float32) + rank), wide[0] + 1]


def own_params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.clone()) for param in params_of(mpisgd.rank())]


def sums(params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    totals = [param.detach().clone() for param in params]
    for total in totals:
        mpisgd.all_reduce(total)
    return totals


def spread(params: list[torch.nn.Parameter]) -> float:
    """How far apart the ranks' models are."""
    low, high = params[0].detach().clone(), params[0].detach().clone()
    mpisgd.all_reduce(low, mpisgd.ReduceOp.MIN)
    mpisgd.all_reduce(high, mpisgd.ReduceOp.MAX)
    return (high - low).max().item()


def step(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], slope: float = 0.0) -> None:
    for param in params:
        param.grad = torch.full_like(param, slope)
    optimizer.step()


def come_together(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
    """Step until the models are close."""
    for _ in range(MAX_STEPS):
        if spread(params) <= 1e-3:
            return
        step(optimizer, params)
        time.sleep(0.001)


@pytest.mark.parametrize("topology", ["ring", "star", "one_peer_exponential", "complete"])
def test_without_gradients_all_come_to_the_mean(topology):
    params = own_params()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(params, lr=0.1), strategy=Gossip(topology, style="asynchronous")
    )
    come_together(optimizer, params)
    reached = spread(params)
    optimizer.rebuild()  # ends all exchanges
    expected = [sum(each) for each in zip(*map(params_of, range(mpisgd.size())), strict=True)]
    for total, exact in zip(sums(params), expected, strict=True):
        tolerance = 1e-12 if total.dtype == torch.float64 else 1e-5
        everyone(torch.allclose(total, exact, rtol=0, atol=tolerance), f"{(total - exact).abs().max()}")
    everyone(reached <= 1e-3, f"{reached}")


def test_no_update_is_lost_and_none_counts_twice():
    """Ranks of different speeds: what all have together is the start and all updates, whoever met whom."""
    size, rank = mpisgd.size(), mpisgd.rank()
    params = own_params()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(params, lr=0.125), strategy=Gossip("ring", style="asynchronous", every=2)
    )
    num_steps = [100 if r == 0 else 10 * r for r in range(size)]
    for _ in range(num_steps[rank]):
        step(optimizer, params, slope=rank + 1.0)
    optimizer.rebuild()
    moved = sum(0.125 * (r + 1) * num_steps[r] for r in range(size))
    start = sum(params_of(r)[0] for r in range(size))
    everyone(torch.allclose(sums(params)[0], start - moved, rtol=0, atol=1e-10))


def test_parameters_that_are_added_are_averaged_too():
    params = own_params()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(params[1:], lr=0.1), strategy=Gossip("complete", style="asynchronous")
    )
    step(optimizer, params[1:])
    optimizer.add_param_group({"params": params[:1]})
    come_together(optimizer, params)
    everyone(spread(params) <= 1e-3)
    optimizer.rebuild()


def test_what_it_cannot_do_is_refused():
    with raises_everywhere(InvalidArgument) as caught:
        mpisgd.DistributedOptimizer(
            torch.optim.SGD(own_params(), lr=0.1),
            strategy=Gossip("ring", style="asynchronous"),
            compression=Compression.bf16,
        )
    everyone("compression=Compression.bf16" in caught.text, caught.text)
