"""Compressors are told how gradients lie, and what they keep follows its elements."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpisgd
from mpisgd import compress
from mpisgd.job.threads_as_ranks import run_ranks

KEEPING = [
    compress.TopK(ratio=0.2),
    compress.DeepGradient(ratio=0.2, momentum=0.5),
    compress.Threshold(value=0.3),
    compress.OneBit(),
    compress.PerHost(compress.TopK(ratio=0.2)),
]


def trained(compression, convert=lambda net: None, begins=lambda net: None):
    """Return the weights of a convolution after six steps, of which `convert` comes after the third."""
    net = nn.Conv2d(3, 4, 2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        net.weight.copy_(torch.linspace(-1, 1, net.weight.numel()).view_as(net.weight))
    begins(net)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), compression=compression
    )
    for step in range(6):
        optimizer.zero_grad()
        factors = torch.cos(torch.arange(48.0, dtype=torch.float64) * (mpisgd.rank() + 2) + step)
        (net.weight * factors.view_as(net.weight)).sum().backward()
        optimizer.step()
        if step == 2:
            convert(net)
    return net.weight.detach().contiguous()


def channels_last(net):
    net.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("compression", KEEPING, ids=lambda each: type(each).__name__)
def test_a_residual_follows_its_elements_when_parameters_are_converted(compression):
    for plain, converted in run_ranks(2, lambda: (trained(compression), trained(compression, channels_last))):
        torch.testing.assert_close(converted, plain)


def test_a_matrix_that_lies_transposed_is_approximated_as_a_matrix():
    def off(transposed):
        u, v = torch.linspace(1, 2, 12), torch.linspace(-1, 1, 15)
        start = torch.zeros(12, 15)
        param = nn.Parameter(start.t().contiguous().t() if transposed else start)
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.SGD([param], lr=1.0), compression=compress.PowerSGD(rank=1, min_compression_rate=1.0)
        )
        (param * u[:, None] * v).sum().backward()  # of rank one: nothing is left out
        optimizer.step()
        return float((param.detach() + u[:, None] * v).abs().max())

    for contiguous, transposed in run_ranks(2, lambda: (off(False), off(True))):
        assert contiguous < 1e-5
        assert transposed < 1e-5
