"""A GradScaler with gradients that stay on their rank: `step()` is called in any case."""

from __future__ import annotations

import pytest
import torch

from mpisgd.methods.strategy.local_scaling import LocalScaling


def wrapped(optimizer: torch.optim.Optimizer, calls: list[bool]) -> torch.optim.Optimizer:
    """As a strategy does it."""
    scaling = LocalScaling(optimizer)
    optimizer.register_step_pre_hook(lambda *_: scaling.before_step(optimizer))
    optimizer.register_step_post_hook(lambda *_: (scaling.after_step(), calls.append(True)))
    return optimizer


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_every_step_is_called_and_equals_that_of_the_scaler_alone(kind, unscales, fused):
    calls: list[bool] = []
    results = []
    for is_wrapped in (False, True):
        param = torch.nn.Parameter(torch.arange(4.0))
        optimizer = kind([param], lr=0.1, fused=fused)
        optimizer = wrapped(optimizer, calls) if is_wrapped else optimizer
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale((param * torch.arange(4.0)).sum()).backward()
            if step == 2:
                param.grad[1] = float("nan")
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append((param.detach(), scaler.get_scale()))
    assert len(calls) == 5
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)


def test_the_gradients_of_a_step_that_was_left_out_are_still_there():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = wrapped(torch.optim.SGD([param], lr=0.1), [])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    param.grad.fill_(float("inf"))
    scaler.step(optimizer)
    assert param.grad.isinf().all()
    assert torch.equal(param.detach(), torch.ones(2))


def test_without_a_scaler_nothing_changes():
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = wrapped(torch.optim.SGD([param], lr=0.5), [])
    param.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((2,), 0.5))
