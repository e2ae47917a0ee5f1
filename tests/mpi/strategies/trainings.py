"""Small trainings, of which every rank knows the data of all."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from verdicts import everyone

import mpisgd

STEPS = 20

# From a model's parameters, an optimizer.
Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02)


def batch(rank: int, step: int) -> Tensor:
    """[4, 8], different for every rank and step."""
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def fresh_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(batch(rank, step)).square().mean().backward()
    optimizer.step()


def wrapped(make: Make, strategy: mpisgd.Strategy, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fresh_model()
    return model, mpisgd.DistributedOptimizer(make(list(model.parameters())), strategy=strategy, **options)


def trained(make: Make, strategy: mpisgd.Strategy, steps: int = STEPS, **options) -> nn.Module:
    """The model of this rank after `steps` steps."""
    model, optimizer = wrapped(make, strategy, **options)
    for step in range(1, steps + 1):
        one_step(model, optimizer, mpisgd.rank(), step)
    return model


def close(model: nn.Module | list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    """Fail on all ranks unless the parameters are what was expected on each of them."""
    params = model if isinstance(model, list) else list(model.parameters())
    errors = [(a - b).abs().max().item() for a, b in zip(params, expected, strict=True)]
    everyone(max(errors) <= tolerance, f"{errors}")


def snapshot(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in copy.deepcopy(model).parameters()]
