"""Buffers of modules take their mean as they are, whatever becomes of the parameters on the wire."""

from __future__ import annotations

import pytest
import torch
from verdicts import everyone, same_on_all_ranks

import mpisgd
from mpisgd import DiLoCo, ElasticAveraging, Gossip, LocalSGD, compress

EXACT = {
    "local": LocalSGD(2),
    "diloco": DiLoCo(2),
    "elastic": ElasticAveraging(every=2),
    "gossip": Gossip("complete", every=2),
    "choco": Gossip("complete", every=2, consensus_step=0.5),
}
COMPRESSIONS = [None, mpisgd.Compression.fp16, compress.TopK(0.2), compress.OneBit()]


def goes(strategy: mpisgd.Strategy, compression: object) -> bool:
    """Whether a strategy takes a compression."""
    if not isinstance(strategy, Gossip):
        return True
    return (strategy.consensus_step is not None) == isinstance(compression, (compress.TopK, compress.OneBit))


def wrapped(strategy: mpisgd.Strategy, compression: object) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    norm = torch.nn.BatchNorm1d(3)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(norm.parameters(), lr=0.01),
        strategy=strategy,
        compression=compression,
        named_buffers=norm.named_buffers(),
    )
    return norm, optimizer


def data(rank: int, step: int) -> torch.Tensor:
    """Of a variance that differs by rank, step and column, and is beyond the range of float16."""
    draw = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(6, 3, generator=draw) * torch.tensor([0.01, 1.0, 1000.0]) * (1 + rank * (step % 3))


def own_statistics(rank: int, step: int, mean: torch.Tensor, variance: torch.Tensor):
    """What BatchNorm makes of its statistics in a step of a rank."""
    x = data(rank, step)
    return 0.9 * mean + 0.1 * x.mean(0), 0.9 * variance + 0.1 * x.var(0)


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
@pytest.mark.parametrize("name", EXACT)
def test_buffers_take_their_exact_mean(name, compression):
    """They were compressed with the parameters, and errors of before made variances negative.

    And what they had changed by was counted from a base that each rank had of its own, if they differed when
    that was taken: here a forward pass comes before the first step.
    """
    strategy = EXACT[name]
    if not goes(strategy, compression):
        pytest.skip("refused")
    norm, optimizer = wrapped(strategy, compression)
    size = mpisgd.size()
    expected = [(torch.zeros(3), torch.ones(3)) for _ in range(size)]
    for step in range(1, 9):
        optimizer.zero_grad()
        norm(data(mpisgd.rank(), step)).square().sum().backward()
        optimizer.step()
        expected = [own_statistics(rank, step, *expected[rank]) for rank in range(size)]
        if step % 2 == 0:
            means = [torch.stack(each).mean(0) for each in zip(*expected, strict=True)]
            expected = [(means[0], means[1])] * size
    found = (norm.running_mean, norm.running_var)
    for got, exact in zip(found, expected[mpisgd.rank()], strict=True):
        everyone(torch.allclose(got, exact, rtol=1e-5, atol=1e-6), f"{got}, {exact}")
    if size > 1 and name != "elastic" and not isinstance(strategy, Gossip):
        same_on_all_ranks([buffer.tolist() for buffer in norm.buffers()])
    with optimizer.consensus():
        everyone(torch.allclose(norm.running_var, expected[0][1], rtol=1e-5), f"{norm.running_var}")
