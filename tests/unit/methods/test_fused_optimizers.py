"""Fused optimizers walk memory, whatever the strides: with every method they train as those that are not.

A parameter that was transposed, or is channels last, does not lie in the order of its elements. Where its
gradient does, a fused optimizer updates elements by the gradients of others, and nobody raises an error.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.methods import catalogue

STEPS = 4


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    transposed = torch.randn(4, 3, dtype=torch.float64).t().contiguous().t()
    images = torch.randn(2, 3, 2, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
    return [nn.Parameter(transposed), nn.Parameter(images), nn.Parameter(torch.ones(5).double())]


def loss(params: list[nn.Parameter], step: int) -> Tensor:
    parts = [
        (param * torch.cos(1.7 * torch.arange(param.numel()) + mpisgd.rank() + step).view(param.shape)).sum()
        for param in params
    ]
    return torch.stack(parts).tanh().sum()


def trained(fused: bool, **options) -> Tensor:
    params = parameters()
    optimizer = mpisgd.DistributedOptimizer(torch.optim.AdamW(params, lr=0.01, fused=fused), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(params, step).backward()
        optimizer.step()
    with optimizer.consensus():
        return torch.cat([param.detach().flatten() for param in params])


def assert_fused_is_the_same(**options) -> None:
    alone, fused = (run_ranks(2, lambda each=each: trained(each, **options))[0] for each in (False, True))
    torch.testing.assert_close(fused, alone, rtol=1e-9, atol=1e-9)


STRATEGIES = [
    each
    for kind in catalogue.strategies()
    for each in kind.examples()
    if not getattr(each, "overlap_forward", False)  # needs modules
    and not each.goes_with.compression.why_not(mpisgd.Compression.none)
]
COMPRESSORS = [each for kind in catalogue.compressors() for each in kind.examples()]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_with_every_strategy(strategy):
    assert_fused_is_the_same(strategy=strategy)


@pytest.mark.parametrize("compression", COMPRESSORS, ids=repr)
def test_with_every_compressor(compression):
    assert_fused_is_the_same(compression=compression)


@pytest.mark.parametrize("options", [{"share_parameters": True}, {"op": mpisgd.Adasum}], ids=repr)
def test_with_shared_parameters_and_with_adasum(options):
    assert_fused_is_the_same(**options)


def test_an_outer_optimizer_may_be_fused():
    def diloco(fused: bool) -> mpisgd.DiLoCo:
        return mpisgd.DiLoCo(2, outer_optimizer=torch.optim.AdamW, outer_options={"lr": 0.1, "fused": fused})

    alone, fused = (
        run_ranks(2, lambda each=each: trained(False, strategy=diloco(each)))[0] for each in (False, True)
    )
    torch.testing.assert_close(fused, alone, rtol=1e-9, atol=1e-9)


# verify() called such a training wrong: torch.autograd.grad has gradients in the order of their elements.


def test_verify_finds_fused_optimizers_right():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = parameters()[0]

        def forward(self, x: Tensor) -> Tensor:
            return (x[:, None, :] * self.weight).sum(2).tanh()

    def verdict() -> mpisgd.Verification:
        inputs = torch.linspace(-1, 1, 36, dtype=torch.float64).view(3, 4, 3)
        return mpisgd.verify(
            Net,
            lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
            lambda net, batch: net(batch[0]).square().mean(),
            [(each,) for each in inputs],
        )

    for found in run_ranks(2, verdict):
        assert found, found
