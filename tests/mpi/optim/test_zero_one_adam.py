"""`ZeroOneAdam` against the algorithm of its paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from one_bit_simulation import (
    SerialExchange,
    begin,
    flat,
    gradients,
    off_by,
    torch_backward,
    torch_parameters,
    unflat,
)
from verdicts import everyone, same_on_all_ranks

import mpisgd

STEPS, LR, BETAS, EPS, DECAY = 24, 0.01, (0.9, 0.99), 1e-8, 0.01
NO_RATE = {1, 4, 7, 9}  # the first step, one before the variance is renewed, and ones afterwards


def rate(step: int) -> float:
    """A learning rate that changes, and is zero at times."""
    return 0.0 if step in NO_RATE else LR / step


@pytest.fixture(autouse=True)
def way():
    """Once is enough: no test here is about how gradients travel."""


def simulate(size: int, renewals: set[int], meetings: set[int]):
    """Algorithm 1 of Lu et al. 2022; yields every rank's parameters."""
    (b1, b2), zero = BETAS, 0.0 * flat(begin())
    exchange, j, v = SerialExchange(size), 0, zero
    x, m, u = ([start] * size for start in (flat(begin()), zero, zero))
    met, gammas = x[0], 0.0
    for step in range(1, STEPS + 1):
        g = [flat(gradients(unflat(x[i]), i, step)) + DECAY * x[i] for i in range(size)]
        gamma = rate(step) / (1 - b1**step)
        if step in renewals:
            average, j = sum(g) / size, j + 1
            v = b2 * v + (1 - b2) * average**2
            d = np.sqrt(v / (1 - b2**j)) + EPS
            m = [b1 * sum(m) / size + (1 - b1) * average] * size  # alike but for a meeting without a rate
            x = [x[0] - gamma * m[0] / d] * size
            met = x[0]
        else:
            m = [b1 * m[i] + (1 - b1) * g[i] for i in range(size)]
            x = [x[i] - gamma * m[i] / d for i in range(size)]
            u, gammas = [u[i] + gamma * m[i] for i in range(size)], gammas + gamma
            if step in meetings:
                joined = u[0] if size == 1 else exchange.average(u)
                met = met - joined / d
                x, u = [met] * size, [zero] * size
                m, gammas = m if gammas == 0.0 else [joined / gammas] * size, 0.0
        yield [unflat(mine) for mine in x]


@pytest.mark.parametrize(
    ("settings", "renewals", "meetings"),
    [
        (
            {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4},
            {1, 2, 3, 5},
            {4, 6, *range(7, 11), 12, 14, *(6 + 4 * i for i in range(3, 5))},
        ),
        ({"var_freeze_step": 24, "var_update_scaler": 1}, {1, 2, 4, 8, 16}, set(range(1, 25))),
    ],
    ids=["local steps", "always meeting"],
)
def test_training_equals_the_simulation(settings, renewals, meetings):
    params = torch_parameters()
    optimizer = mpisgd.ZeroOneAdam(params, LR, BETAS, EPS, DECAY, **settings)
    for step, everyones in enumerate(simulate(mpisgd.size(), renewals, meetings), 1):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        torch_backward(params, step)
        optimizer.step()
        error = off_by(params, everyones[mpisgd.rank()])
        everyone(error < 1e-12, f"step {step}: {error}")
        everyone(optimizer.is_synchronized == (step in renewals | meetings), f"step {step}")
        if optimizer.is_synchronized:
            same_on_all_ranks([param.tolist() for param in params])


def test_with_a_variance_renewed_in_every_step_it_is_adam():
    ours, plain = torch_parameters(), torch_parameters()
    optimizer = mpisgd.ZeroOneAdam(ours, LR, var_freeze_step=STEPS, var_update_scaler=STEPS)
    synchronous = mpisgd.DistributedOptimizer(torch.optim.Adam(plain, LR))
    for step in range(STEPS):
        for params, opt in ((ours, optimizer), (plain, synchronous)):
            opt.zero_grad()
            torch_backward(params, step)
            opt.step()
    error = off_by(ours, [param.detach().numpy() for param in plain])
    everyone(error < 1e-12, f"{error}")


@pytest.mark.mpi(min_size=2)
def test_local_steps_send_nothing():
    params = torch_parameters()
    settings = {"var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 4}
    optimizer = mpisgd.ZeroOneAdam(params, LR, var_freeze_step=1, **settings)
    counts = []
    for step in range(17):
        torch_backward(params, step)
        before = optimizer.group.queue.consistency.number
        optimizer.step()
        counts.append(optimizer.group.queue.consistency.number > before)
    meets = [step in (1, 2, 3, 5, 9, 13, 17) for step in range(1, 18)]
    everyone(counts == meets, f"{counts} {meets}")
