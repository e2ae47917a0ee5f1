"""The same layers are dropped on every rank, and training on N ranks equals one process that drops them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd.nn import ProgressiveLayerDropping

BATCH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def test_the_seed_of_rank_0_counts():
    torch.manual_seed(mpisgd.rank())
    by_program = ProgressiveLayerDropping(0.3, 10.0)
    by_argument = ProgressiveLayerDropping(0.3, 10.0, seed=100 + mpisgd.rank())
    everyone((by_program.seed, by_argument.seed) == (0, 100), f"{by_program}, {by_argument}")
    by_program.step()
    same_on_all_ranks(by_program.kept(50))


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_schedules_are_told():
    with raises_everywhere(mpisgd.CollectiveMismatch):
        ProgressiveLayerDropping(0.3 if mpisgd.rank() else 0.4, 10.0)


def test_training_equals_one_process_on_the_joined_batch():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(5))).double()
    plain = copy.deepcopy(model)
    both = []
    for module in (model, plain):
        both.append(ProgressiveLayerDropping(0.2, 1.0, seed=4))
        both[-1].wrap(module, ("linear",))
    ours = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    unused = 0
    for step in range(10):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, 5, generator=draw, dtype=torch.float64)
        for module, optimizer, rows in (
            (model, ours, x.chunk(mpisgd.size())[mpisgd.rank()]),
            (plain, expected, x),
        ):
            optimizer.zero_grad()
            (module(rows).requires_grad_() ** 2).mean().backward()
            optimizer.step()
        unused += sum(param.grad is None for param in model.parameters())
        for dropping in both:
            dropping.step()
    apart = max(
        (a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    everyone(apart < 1e-12 and unused > 0, f"{apart:.1e}, {unused} unused")
