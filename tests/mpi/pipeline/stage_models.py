"""Models in stages for the tests of pipelines, and what training without a pipeline makes of them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.pipeline import Pipeline

WIDTHS = (5, 6, 4, 7, 3, 6, 5, 4, 3)


def make_stages(count: int = 4) -> list[nn.Module]:
    """Stages of different widths, equal on all ranks."""
    torch.manual_seed(11)
    pairs = itertools.pairwise(WIDTHS[: count + 1])
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in pairs]


def batch(number: int, rows: int, count: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs and targets for so many stages, different for each number."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(rows, WIDTHS[0], dtype=torch.float64, generator=generator)
    return inputs, torch.randn(rows, WIDTHS[count], dtype=torch.float64, generator=generator)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


def whole(stages: list[nn.Module]) -> nn.Module:
    return nn.Sequential(*stages)


def has_last(pipeline: Pipeline) -> bool:
    return pipeline.shape.num_stages - 1 in pipeline.stages


def error_of_parameters(pipeline: Pipeline, stages: list[nn.Module]) -> float:
    """How far this rank's stages are from the expected ones."""
    pairs = [
        (mine, expected)
        for number, module in pipeline.stages.items()
        for mine, expected in zip(module.parameters(), stages[number].parameters(), strict=True)
    ]
    return max((float((mine - expected).detach().abs().max()) for mine, expected in pairs), default=0.0)


def error_of_gradients(pipeline: Pipeline, stages: list[nn.Module]) -> float:
    """The same of their gradients."""
    pairs = [
        (mine.grad, expected.grad)
        for number, module in pipeline.stages.items()
        for mine, expected in zip(module.parameters(), stages[number].parameters(), strict=True)
    ]
    if any(mine is None or expected is None for mine, expected in pairs):
        return float("inf")
    return max((float((mine - expected).abs().max()) for mine, expected in pairs), default=0.0)


def replicas_of(size: int) -> tuple[int, ...]:
    """Stages with different numbers of replicas on so many ranks."""
    return {1: (1,), 2: (2,), 3: (2, 1), 4: (1, 2, 1)}.get(size, (1,) * size)
