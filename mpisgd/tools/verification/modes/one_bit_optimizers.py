"""Optimizers whose momentum travels as one bit per element: equal to their papers, in one process."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.core.group import Group
from mpisgd.methods.one_bit_adam.paper import OneBitAdam
from mpisgd.methods.one_bit_lamb.paper import OneBitLamb
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.two_step.paper import TwoStep
from mpisgd.methods.zero_one_adam.paper import ZeroOneAdam
from mpisgd.tools.verification.mode import Mode, between_orders
from mpisgd.tools.verification.paper_run import Definition
from mpisgd.tools.verification.papers import in_order
from mpisgd.tools.verification.problem import Problem
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import trajectory

__all__ = ["ONE_BIT_OPTIMIZERS"]

LR, BETAS, EPS = 0.01, (0.9, 0.99), 1e-4  # an epsilon that keeps it from dividing by next to nothing
FREEZE = 3
# By the policies of 0/1 Adam with these arguments, step by step: see the paper's section 6.
POLICY = {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 2}
RENEWALS = {1, 2, 4}
MEETINGS = {3, 5, 6, *range(8, 1000, 2)}

MakeOptimizer = Callable[[Sequence[nn.Parameter], Group | None], torch.optim.Optimizer]


def rate(_: int) -> float:
    """Return the learning rate of a step."""
    return LR


def trained_by(make: MakeOptimizer) -> Callable[[Trainer], Tensor]:
    """Return the training by an optimizer that communicates by itself."""

    def train(trainer: Trainer) -> Tensor:
        model = trainer.problem.model()
        optimizer = make(list(model.parameters()), trainer.group())
        return torch.stack(trainer.train(model, optimizer))

    return train


def _mode(name: str, make: MakeOptimizer, paper: Paper[Any], *, quick: bool = True) -> Mode:
    def simulate(problem: Problem, order: int) -> Tensor:
        return trajectory(problem, None, Definition(paper, TwoStep(), in_order), order)

    return Mode(name, "optimizers", trained_by(make), between_orders(simulate), (2, 2**31), quick=quick)


ONE_BIT_OPTIMIZERS = (
    _mode(
        "OneBitAdam",
        lambda params, group: mpisgd.OneBitAdam(params, LR, BETAS, EPS, freeze_step=FREEZE, group=group),
        OneBitAdam(FREEZE, rate, *BETAS, EPS),
    ),
    _mode(
        "ZeroOneAdam",
        lambda params, group: mpisgd.ZeroOneAdam(params, LR, BETAS, EPS, group=group, **POLICY),
        ZeroOneAdam(RENEWALS, MEETINGS, rate, *BETAS, EPS),
        quick=False,
    ),
    _mode(
        "OneBitLamb",
        lambda params, group: mpisgd.OneBitLamb(params, LR, BETAS, EPS, freeze_step=FREEZE, group=group),
        OneBitLamb(FREEZE, rate, *BETAS, EPS),
        quick=False,
    ),
)
