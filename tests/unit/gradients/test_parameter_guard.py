"""`ParameterGuard` holds for what is as it was, and for nothing that changes a plan."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from mpisgd.gradients.parameter_guard import ParameterGuard


def parameters() -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.randn(4, 4)),
        nn.Parameter(torch.randn(4)),
        nn.Parameter(torch.randn(2, 3, 5, 5)),
    ]


def set_data(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list], None]:
    def apply(params: list[nn.Parameter]) -> None:
        params[index].data = change(params[index].data)

    return apply


CHANGES = {
    "dtype": set_data(1, torch.Tensor.double),
    "shape": set_data(1, lambda data: data[:3].clone()),
    "transposed": set_data(0, torch.Tensor.t),
    "memory format": set_data(2, lambda data: data.contiguous(memory_format=torch.channels_last)),
    "dimensions": set_data(0, torch.Tensor.flatten),
    "frozen": lambda params: params[2].requires_grad_(False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_it_does_not_hold_after_a_change(name):
    params = parameters()
    guard = ParameterGuard(params)
    assert guard.holds(params)
    CHANGES[name](params)
    assert not guard.holds(params)


@torch.no_grad()
def test_values_gradients_and_other_memory_are_no_change():
    params = parameters()
    guard = ParameterGuard(params)
    for param in params:
        param.add_(1)
        param.grad = torch.ones_like(param)
        param.data = param.data.clone(memory_format=torch.preserve_format)
    assert guard.holds(params)
    with torch.enable_grad():
        assert guard.holds(params)


def test_where_one_was_frozen_the_caller_looks_itself():
    params = parameters()
    params[0].requires_grad_(False)
    assert not ParameterGuard(params).holds(params)


@pytest.mark.parametrize("found", [None, 7])
def test_without_torchs_guards_the_caller_looks_itself(monkeypatch, found):
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", found)
    assert not ParameterGuard(parameters()).holds(parameters())


def test_the_guards_are_there_with_this_torch():
    """Else a model of hundreds of small tensors takes 1.5 % longer, and nobody is told."""
    assert ParameterGuard(parameters())._guards is not None
