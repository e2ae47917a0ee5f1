"""Optimizers that communicate are what their papers say."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from paper_programs import CLOSE, Program, assert_same, by_optimizer, by_paper
from torch import nn

import mpisgd
from mpisgd.methods.dion.paper import Dion
from mpisgd.methods.one_bit_adam.paper import OneBitAdam
from mpisgd.methods.one_bit_lamb.paper import OneBitLamb
from mpisgd.methods.paper_kit import Paper, Vec, World
from mpisgd.methods.two_step.paper import TwoStep
from mpisgd.methods.zero_one_adam.paper import ZeroOneAdam
from mpisgd.tools.verification.paper_run import Definition
from mpisgd.tools.verification.papers import in_order

BETAS, EPS, DECAY = (0.9, 0.99), 1e-8, 0.01
LOCAL_STEPS = {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}
RENEWALS, MEETINGS = {1, 2, 3, 5}, {4, 6, *range(7, 11), 12, 14, 18, 22}
NO_RATE = {1, 4, 7, 9}  # the first step, one before the variance is renewed, and ones afterwards


def constant(step: int) -> float:
    return 0.01


def changing(step: int) -> float:
    return 0.0 if step in NO_RATE else 0.01 / step


class Decayed(Paper[Any]):
    """Weight decay as a part of the gradient, which is no matter of the papers."""

    def __init__(self, paper: Paper[Any]) -> None:
        self.paper = paper

    def start(self, x: dict[int, Vec], w: World) -> Any:
        return self.paper.start(x, w)

    def update(self, s: Any, x: dict[int, Vec], g: dict[int, Vec], w: World) -> tuple[Any, dict[int, Vec]]:
        return self.paper.update(s, x, {i: g[i] + DECAY * x[i].only(g[i]) for i in w.ranks}, w)


def check(
    size: int,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    paper: Paper[Any],
    rate: Callable[[int], float] = constant,
    **situation: Any,
) -> list[list[Mapping[str, torch.Tensor]]]:
    """Compare, and return the parameters."""
    program = Program(size=size, dyadic=False, steps=24, **situation)

    def wrapped(params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        optimizer, step = make(list(params.values())), 0

        def set_rate(*_: Any) -> None:
            nonlocal step
            step += 1
            optimizer.param_groups[0]["lr"] = rate(step)

        optimizer.register_step_pre_hook(set_rate)
        return optimizer

    found = by_optimizer(program, wrapped)
    definition = Definition(paper, TwoStep(), in_order)
    assert_same(found, by_paper(program, definition, updates=False), CLOSE)
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("freeze", "decoupled"), [(1, False), (7, False), (7, True)])
def test_one_bit_adam(size, freeze, decoupled):
    def make(params):
        return mpisgd.OneBitAdam(
            params, 0.01, BETAS, EPS, DECAY, freeze_step=freeze, decoupled_weight_decay=decoupled
        )

    if decoupled:
        check(size, make, OneBitAdam(freeze, constant, *BETAS, EPS, DECAY))
    else:
        check(size, make, Decayed(OneBitAdam(freeze, constant, *BETAS, EPS)))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("freeze", "decay"), [(5, 0.0), (5, 0.1), (24, 0.1)])
def test_one_bit_lamb(size, freeze, decay):
    limits = {"max_coeff": 10.0, "min_coeff": 0.01, "coeff_beta": 0.8, "factor_max": 1.5, "factor_min": 0.5}

    def make(params):
        return mpisgd.OneBitLamb(params, 0.01, BETAS, 1e-6, decay, freeze_step=freeze, **limits)

    paper = OneBitLamb(freeze, constant, *BETAS, 1e-6, decay, b3=0.8, r_limits=(0.5, 1.5))
    check(size, make, paper)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("settings", "renewals", "meetings"),
    [
        (LOCAL_STEPS, RENEWALS, MEETINGS),
        ({"var_freeze_step": 24, "var_update_scaler": 1}, {1, 2, 4, 8, 16}, set(range(1, 25))),
    ],
    ids=["local steps", "always meeting"],
)
def test_zero_one_adam(size, settings, renewals, meetings):
    def make(params):
        return mpisgd.ZeroOneAdam(params, 0.01, BETAS, EPS, DECAY, **settings)

    found = check(size, make, Decayed(ZeroOneAdam(renewals, meetings, changing, *BETAS, EPS)), changing)
    for step in range(1, 25):
        rows = [torch.cat([x.flatten() for x in mine[step - 1].values()]) for mine in found]
        alike = all(torch.equal(row, rows[0]) for row in rows)
        # Ranks that have met are alike, and stay so in a step without a learning rate.
        assert alike == (size == 1 or step in renewals | meetings or changing(step) == 0.0)


SITUATIONS = {
    "accumulated": {"passes": lambda rank, step: 2},
    "unused on a rank": {
        "unused": lambda rank, step: ["bias", "cube"] if rank == 1 and step in (3, 9) else []
    },
    "no backward on a rank": {"passes": lambda rank, step: int(rank == 0 or step != 9)},
    "ranks on two hosts": {"hosts": (2, 1)},
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations(situation):
    def adam(params):
        return mpisgd.OneBitAdam(params, 0.01, BETAS, EPS, freeze_step=6)

    def lamb(params):
        return mpisgd.OneBitLamb(params, 0.01, BETAS, EPS, freeze_step=6)

    def zero_one(params):
        return mpisgd.ZeroOneAdam(params, 0.01, BETAS, EPS, **LOCAL_STEPS)

    chosen = SITUATIONS[situation]
    check(3, adam, OneBitAdam(6, constant, *BETAS, EPS), **chosen)
    check(3, lamb, OneBitLamb(6, constant, *BETAS, EPS), **chosen)
    check(3, zero_one, ZeroOneAdam(RENEWALS, MEETINGS, constant, *BETAS, EPS), **chosen)


# -- Dion: matrices by the paper, the rest by AdamW ---------------------------------------------------------


def rest_by_adamw(params: Any) -> torch.optim.Optimizer:
    rest = [param for param in params if param.dim() != 2]
    return torch.optim.AdamW(rest, 0.02, BETAS, weight_decay=0.1)


DION = {
    "plain": {},
    "hosts": {"hosts": (2, 1)},
    "passes": {"passes": lambda rank, step: 1 + (rank + step) % 2},
    "no backward": {"passes": lambda rank, step: int((rank, step) != (0, 1))},
    "some unused": {"unused": lambda rank, step: ("matrix", "bias") if rank == step % 2 else ()},
    "nobody uses it": {"unused": lambda rank, step: ("matrix",) if step in (0, 3) else ()},
    "frozen": {"frozen": ("cube",)},
}
FRACTIONS, SIZES = (0.1, 0.5, 1.0), (1, 2, 3, 4)
# Each two of a situation, a fraction and a number of ranks meet in one that is not long.
DION_CASES = [
    pytest.param(
        name,
        fraction,
        size,
        marks=() if name == "hosts" or size == SIZES[(i + j + i // 4) % 4] else pytest.mark.long,
    )
    for (i, name), (j, fraction), size in itertools.product(enumerate(DION), enumerate(FRACTIONS), SIZES)
    if name != "hosts" or size == 3
]


@pytest.mark.parametrize(("situation", "fraction", "size"), DION_CASES)
def test_dion(size, fraction, situation):
    def make(params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        return mpisgd.Dion(
            params.values(),
            lr=0.02,
            weight_decay=0.1,
            momentum=0.9,
            rank_fraction=fraction,
            adjust_lr_fn="spectral_norm",
            adamw_betas=BETAS,
        )

    program = Program(size=size, dyadic=False, steps=12, make=rest_by_adamw, **DION[situation])
    paper = Dion(lr=0.02, mu=0.9, decay=0.1, fraction=fraction, scale=lambda s: (s[0] / s[1]) ** 0.5)
    assert_same(by_optimizer(program, make), by_paper(program, Definition(paper)), CLOSE)
