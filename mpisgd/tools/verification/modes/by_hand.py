"""Gradients that the program averages itself, by each algorithm of `all_reduce` in turn."""

import torch
from torch import Tensor

import mpisgd
from mpisgd.collectives.all_reduce import CHOICES
from mpisgd.tools.verification.mode import Mode
from mpisgd.tools.verification.modes.synchronous import equal_to_one_process, sgd
from mpisgd.tools.verification.trainer import Trainer

__all__ = ["BY_HAND"]


def averaged(trainer: Trainer) -> Tensor:
    """Return the training: each parameter of each step has an algorithm of its own."""
    model, group, number = trainer.problem.model(), trainer.group(), 0
    optimizer = sgd(list(model.parameters()))

    def average() -> None:
        nonlocal number
        for param in model.parameters():
            assert param.grad is not None
            mpisgd.all_reduce(
                param.grad, mpisgd.ReduceOp.AVG, group, algorithm=CHOICES[number % len(CHOICES)]
            )
            number += 1

    return torch.stack(trainer.train(model, optimizer, before_step=average))


BY_HAND = (Mode("every algorithm of all_reduce", "synchronous", averaged, equal_to_one_process(sgd)),)
