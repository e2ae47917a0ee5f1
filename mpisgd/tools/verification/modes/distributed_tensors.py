"""Training a model whose parameters may be DTensors, of which each rank has a part.

Modes load DTensor when they train: its import takes longer than most modes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.tools.verification.modes.synchronous import sgd
from mpisgd.tools.verification.problem import Batch
from mpisgd.tools.verification.trainer import Trainer

__all__ = ["joined", "local", "train_distributed", "whole"]


def joined(trainer: Trainer, step: int, ranks: Sequence[int]) -> Batch:
    """Return the shares of some ranks together."""
    return [torch.cat(parts) for parts in zip(*(trainer.batch(step, rank) for rank in ranks), strict=True)]


def train_distributed(trainer: Trainer, model: nn.Module, batch: Callable[[int], Batch]) -> Tensor:
    """Train with a batch for each step; return the whole parameters after each. Collective."""
    optimizer = sgd(list(model.parameters()))
    rows = []
    for step in range(trainer.problem.steps):
        optimizer.zero_grad()
        torch.autograd.backward(trainer.loss(model, batch(step)))
        optimizer.step()
        trainer.end_step([local(param) for param in model.parameters()])
        rows.append(torch.cat([whole(param).detach().flatten() for param in model.parameters()]))
    return torch.stack(rows)


def local(param: Any) -> Tensor:
    """Return this rank's part of a parameter, which may be a DTensor."""
    part: Tensor = param.to_local() if hasattr(param, "to_local") else param
    return part


def whole(param: Any) -> Tensor:
    """Return the plain tensor that a parameter, which may be a DTensor, stands for. Collective."""
    tensor: Tensor = param.full_tensor() if hasattr(param, "full_tensor") else param
    return tensor
