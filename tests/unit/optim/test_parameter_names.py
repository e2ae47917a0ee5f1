"""What the parameters of an optimizer are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpisgd.errors import InvalidArgument, UnsupportedTensor
from mpisgd.parameters.parameter_names import name_parameters


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def names(optimizer, named=None) -> list[str]:
    return [name for name, _ in name_parameters(optimizer, named)]


def test_the_models_names_in_the_optimizers_order(model):
    groups = [{"params": model[1].parameters()}, {"params": model[0].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    assert names(optimizer, model.named_parameters()) == ["1.weight", "1.bias", "0.weight", "0.bias"]


def test_without_names_the_place_in_the_optimizer_says_which(model):
    optimizer = torch.optim.SGD([{"params": model[1].weight}, {"params": model[0].parameters()}], lr=0.1)
    assert names(optimizer) == ["group 0, parameter 0", "group 1, parameter 0", "group 1, parameter 1"]


def test_names_that_the_optimizer_was_given_are_known(model):
    assert names(torch.optim.SGD(model.named_parameters(), lr=0.1)) == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]


def test_tied_weights_have_their_first_name(model):
    model[1].weight = model[0].weight
    named = list(model.named_parameters(remove_duplicate=False))
    assert names(torch.optim.SGD(model.parameters(), lr=0.1), named) == ["0.weight", "0.bias", "1.bias"]


def test_names_may_be_more_than_the_optimizer_trains(model):
    assert names(torch.optim.SGD([model[1].bias], lr=0.1), model.named_parameters()) == ["1.bias"]


@pytest.mark.parametrize(
    ("named", "told"),
    [
        (lambda m: [("w", m[0].weight), ("w", m[0].bias)], "'w' twice"),
        (lambda m: m[0].named_parameters(), r"parameter 2 of the optimizer, \[1, 3\]"),
        (lambda m: m.parameters(), "expected .name, parameter. pairs"),
        (lambda m: next(iter(m.named_parameters())), "expected .name, parameter. pairs"),
        (lambda m: 7, "has a int"),
    ],
)
def test_wrong_names_are_refused(model, named, told):
    with pytest.raises(InvalidArgument, match=told):
        name_parameters(torch.optim.SGD(model.parameters(), lr=0.1), named(model))


def test_parameters_that_are_elsewhere_are_refused_by_name():
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(UnsupportedTensor, match=r"parameter 0 is on meta"):
        name_parameters(torch.optim.SGD(model.parameters(), lr=0.1), None)
