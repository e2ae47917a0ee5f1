"""`OneBitAdam`: Adam before the freeze, 1-bit momentum after it, which is its paper in tests/unit/methods."""

from __future__ import annotations

import pytest
import torch
from given_losses import off_by, torch_backward, torch_parameters
from verdicts import everyone

import mpisgd

STEPS, LR, BETAS, EPS, DECAY = 20, 0.01, (0.9, 0.99), 1e-8, 0.01


@pytest.fixture(autouse=True)
def way():
    """Once is enough: no test here is about how gradients travel."""


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_never_frozen_it_is_adam_under_synchronous(kind):
    ours, plain = torch_parameters(), torch_parameters()
    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    decoupled = kind is torch.optim.AdamW
    optimizer = mpisgd.OneBitAdam(ours, **settings, freeze_step=STEPS, decoupled_weight_decay=decoupled)
    synchronous = mpisgd.DistributedOptimizer(kind(plain, **settings))
    for step in range(STEPS):
        for params, opt in ((ours, optimizer), (plain, synchronous)):
            opt.zero_grad()
            torch_backward(params, step)
            opt.step()
        error = off_by(ours, [param.detach().numpy() for param in plain])
        everyone(error < 1e-12, f"step {step}: {error}")


@pytest.mark.parametrize("freeze", [2, 20])
def test_micro_batches_accumulate(freeze):
    once, twice = torch_parameters(), torch_parameters()
    optimizers = [mpisgd.OneBitAdam(params, LR, freeze_step=freeze) for params in (once, twice)]
    for step in range(5):
        for params, optimizer, shares in zip((once, twice), optimizers, ((1.0,), (0.25, 0.75)), strict=True):
            optimizer.zero_grad()
            for share in shares:
                torch_backward(params, step, share)
            optimizer.step()
    error = off_by(twice, [param.detach().numpy() for param in once])
    everyone(error < 1e-12, f"{error}")


def test_small_gradients_are_not_drowned_by_large_ones():
    """Each parameter has a magnitude of its own; one for all would throw the last ones far away."""
    params = [torch.nn.Parameter(param.detach().float()) for param in torch_parameters()]
    begun = [(param - k).norm().item() for k, param in enumerate(params)]
    optimizer = mpisgd.OneBitAdam(params, lr=0.05, freeze_step=30)
    for _ in range(150):
        optimizer.zero_grad()
        sum((10.0**-k * (p - k) ** 2).sum() for k, p in enumerate(params)).backward()
        optimizer.step()
    ratios = [(param - k).norm().item() / b for (k, param), b in zip(enumerate(params), begun, strict=True)]
    everyone(max(ratios) < 0.6, f"{ratios}")
