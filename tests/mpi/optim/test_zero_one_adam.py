"""`ZeroOneAdam`, which is its paper in tests/unit/methods: when its ranks meet, and when it is Adam."""

from __future__ import annotations

import pytest
import torch
from given_losses import off_by, torch_backward, torch_parameters
from verdicts import everyone, same_on_all_ranks

import mpisgd

STEPS, LR = 24, 0.01


@pytest.fixture(autouse=True)
def way():
    """Once is enough: no test here is about how gradients travel."""


def test_it_tells_in_which_steps_all_ranks_are_alike():
    settings = {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4}
    params = torch_parameters()
    optimizer = mpisgd.ZeroOneAdam(params, LR, **settings)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        torch_backward(params, step)
        optimizer.step()
        meets = step <= 10 or step in (12, 14, 18, 22)
        everyone(optimizer.is_synchronized == meets, f"step {step}")
        if meets:
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
