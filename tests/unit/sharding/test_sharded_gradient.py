"""What stands for a gradient that is divided among ranks: a shape, and an error for whoever wants more."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from mpisgd.errors import InvalidArgument
from mpisgd.sharding.reduction.sharded_gradient import ShardedGradient

asked: list[tuple] = []


def unscale(*args):
    asked.append(args)


@pytest.fixture
def param():
    weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    weight.grad = ShardedGradient(weight, "w", weakref.ref(unscale))
    return weight


def test_it_is_a_gradient_like_the_parameter(param):
    assert param.grad.shape == (3, 2)
    assert param.grad.stride() == param.stride()
    assert param.grad.dtype is torch.float32
    assert not param.grad.is_sparse
    assert "gradient of w is divided" in repr(param.grad)


@pytest.mark.parametrize(
    "use",
    [
        lambda param: nn.utils.clip_grad_norm_([param], 1.0),
        lambda param: nn.utils.clip_grad_norm_([param], 1.0, foreach=True),
        lambda param: nn.utils.clip_grad_value_([param], 1.0),
        lambda param: param.grad.norm(),
        lambda param: param.grad + 1,
        lambda param: param.grad.detach(),
        lambda param: torch.stack([torch.zeros(3, 2), param.grad]),
        lambda param: torch.optim.SGD([param], lr=1.0).step(),
        lambda param: torch.optim.Adam([param], lr=1.0, foreach=True).step(),
        lambda param: torch.optim.SGD([param], lr=1.0).zero_grad(set_to_none=False),
        lambda param: param.sum().backward(),
    ],
)
def test_whoever_wants_its_values_is_told_what_to_do(param, use):
    with pytest.raises(InvalidArgument, match="gradient of w is divided"):
        use(param)


def test_it_can_be_dropped(param):
    torch.optim.SGD([param], lr=1.0).zero_grad()
    assert param.grad is None


def test_a_scaler_gets_what_it_asks_for(param):
    found_inf, factor = torch.zeros(1), torch.tensor([0.5])
    torch._amp_foreach_non_finite_check_and_unscale_([param.grad], found_inf, factor)
    grads, *rest = asked.pop()
    assert grads[0] is param.grad
    assert rest[0] is found_inf
    assert rest[1] is factor
