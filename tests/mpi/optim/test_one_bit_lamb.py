"""`OneBitLamb`: LAMB before the freeze, 1-bit momentum after it, against the algorithm of its paper."""

from __future__ import annotations

import numpy as np
import pytest
from one_bit_simulation import (
    SerialExchange,
    begin,
    flat,
    gradients,
    mean,
    off_by,
    torch_backward,
    torch_parameters,
    unflat,
)
from verdicts import everyone, same_on_all_ranks

import mpisgd
from mpisgd.errors import InvalidArgument

STEPS, LR, BETAS, EPS = 20, 0.02, (0.9, 0.99), 1e-6
LIMITS = {"max_coeff": 10.0, "min_coeff": 0.01, "coeff_beta": 0.8, "factor_max": 1.5, "factor_min": 0.5}
THRESHOLD = 0.1


@pytest.fixture(autouse=True)
def way():
    """Once is enough: no test here is about how gradients travel."""


def norm(array: np.ndarray) -> float:
    return float(np.sqrt((array**2).sum()))


class Layer:
    """One parameter in Li et al. 2021, algorithm 1."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.m, self.v, self.coeff, self.factor = x, 0 * x, 0 * x, None, 1.0

    def warm_up(self, g: np.ndarray, decay: float) -> None:
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * g
        self.v = self.fresh = BETAS[1] * self.v + (1 - BETAS[1]) * g**2
        u = self.m / (np.sqrt(self.v) + EPS) + decay * self.x
        c = float(np.clip(norm(self.x) / norm(u), LIMITS["min_coeff"], LIMITS["max_coeff"]))
        earlier, beta = c if self.coeff is None else self.coeff, LIMITS["coeff_beta"]
        self.coeff = beta * earlier + (1 - beta) * c
        self.x = self.x - LR * c * u

    def compressed(self, m: np.ndarray, decay: float) -> None:
        g = (m - BETAS[0] * self.m) / (1 - BETAS[0])
        self.m, self.fresh = m, BETAS[1] * self.fresh + (1 - BETAS[1]) * g**2
        ratio = ((np.sqrt(self.v) + EPS) / (np.sqrt(self.fresh) + EPS)).max()
        step = m / (np.sqrt(self.v) + EPS)
        share = min(1.0, norm(step) / norm(step + decay * self.x))
        r = np.clip(ratio * share + 1 - share, LIMITS["factor_min"], LIMITS["factor_max"])
        self.factor = float(np.clip(r, self.factor * (1 - THRESHOLD), self.factor * (1 + THRESHOLD)))
        self.x = self.x - LR * self.coeff * self.factor * (step + decay * self.x)


def simulate(size: int, freeze: int, decay: float):
    layers, exchange = [Layer(x) for x in begin()], SerialExchange(size)
    for step in range(1, STEPS + 1):
        local = [gradients([layer.x for layer in layers], rank, step) for rank in range(size)]
        if step <= freeze:
            for layer, g in zip(layers, mean(local), strict=True):
                layer.warm_up(g, decay)
        else:
            momenta = [
                flat([BETAS[0] * la.m + (1 - BETAS[0]) * g for la, g in zip(layers, mine, strict=True)])
                for mine in local
            ]
            result = momenta[0] if size == 1 else exchange.average(momenta)
            for layer, m in zip(layers, unflat(result), strict=True):
                layer.compressed(m, decay)
        yield [layer.x for layer in layers], [layer.factor for layer in layers]


@pytest.mark.parametrize(("freeze", "decay"), [(5, 0.0), (5, 0.1), (20, 0.1)])
def test_training_equals_the_simulation(freeze, decay):
    params, factors = torch_parameters(), set()
    optimizer = mpisgd.OneBitLamb(
        params, LR, BETAS, EPS, decay, freeze_step=freeze, **LIMITS, factor_threshold=THRESHOLD
    )
    for step, (simulated, r) in enumerate(simulate(mpisgd.size(), freeze, decay), 1):
        optimizer.zero_grad()
        torch_backward(params, step)
        optimizer.step()
        factors.update(r)
        everyone(off_by(params, simulated) < 1e-12, f"step {step}: {off_by(params, simulated)}")
    same_on_all_ranks([param.tolist() for param in params])
    assert freeze == STEPS or len(factors) > 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff=2.0 is above"),
        ({"coeff_beta": 1.0}, "coeff_beta=1.0"),
        ({"factor_threshold": 0}, "factor_threshold=0"),
    ],
)
def test_arguments_are_checked(options, said):
    with pytest.raises(InvalidArgument, match=said):
        mpisgd.OneBitLamb(torch_parameters(), freeze_step=3, **options)
