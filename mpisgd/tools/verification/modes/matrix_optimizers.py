"""Optimizers for matrices that communicate: `Dion`, equal to its paper in one process."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.methods.dion.paper import Dion
from mpisgd.tools.verification.mode import Mode, between_orders
from mpisgd.tools.verification.modes.one_bit_optimizers import trained_by
from mpisgd.tools.verification.paper_run import Definition
from mpisgd.tools.verification.problem import Problem
from mpisgd.tools.verification.trajectories import trajectory

__all__ = ["MATRIX_OPTIMIZERS"]

LR, MU, DECAY, FRACTION, EPS = 0.01, 0.9, 0.1, 0.5, 1e-4  # an epsilon that keeps it from next to nothing


def rest_by_adamw(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all but the matrices."""
    rest = [param for param in params if param.dim() != 2]
    return torch.optim.AdamW(rest, LR, (0.9, 0.95), EPS, DECAY)


def _simulated(problem: Problem, order: int) -> Tensor:
    return trajectory(problem, rest_by_adamw, Definition(Dion(LR, MU, DECAY, FRACTION)), order)


def _dion(params: Sequence[nn.Parameter], group: mpisgd.Group | None) -> torch.optim.Optimizer:
    return mpisgd.Dion(
        params,
        LR,
        DECAY,
        momentum=MU,
        rank_fraction=FRACTION,
        adjust_lr_fn="none",
        adamw_eps=EPS,
        group=group,
    )


MATRIX_OPTIMIZERS: tuple[Mode, ...] = (
    Mode("Dion", "optimizers", trained_by(_dion), between_orders(_simulated), quick=True),
)
