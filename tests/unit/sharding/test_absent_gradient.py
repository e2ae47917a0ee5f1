"""What stands for a gradient that is with another rank: a shape, and an error for whoever wants more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpisgd.errors import InvalidArgument
from mpisgd.sharding.absent_gradient import AbsentGradient


@pytest.fixture
def param():
    weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    weight.grad = AbsentGradient(weight, "w is on rank 1")
    return weight


def test_it_is_a_gradient_like_the_parameter(param):
    assert param.grad.shape == (3, 2)
    assert param.grad.stride() == param.stride()
    assert param.grad.dtype is torch.float32
    assert not param.grad.is_sparse
    assert "w is on rank 1" in repr(param.grad)


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
def test_whoever_wants_its_values_is_told_where_they_are(param, use):
    with pytest.raises(InvalidArgument, match="w is on rank 1"):
        use(param)


def test_it_can_be_dropped(param):
    torch.optim.SGD([param], lr=1.0).zero_grad()
    assert param.grad is None
