"""A subclass of `DistributedOptimizer` wraps as the class itself does."""

from __future__ import annotations

import pytest
import torch

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks


class Counting(mpisgd.DistributedOptimizer):
    """Counts its steps."""

    def __init__(self, optimizer, **options):
        super().__init__(optimizer, **options)
        self.count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)


class Own(torch.optim.SGD):
    """A class whose step calls that of its parent."""

    def step(self, closure=None):
        return super().step(closure)


def trained(kind, wrapped=torch.optim.SGD):
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = kind(wrapped(model.parameters(), lr=0.5))
    model(torch.full((1, 2), 1.0 + mpisgd.rank())).sum().backward()
    optimizer.step()
    return optimizer, model.weight.detach().tolist()


def test_a_subclass_of_a_user_is_entered_and_trains_as_the_class_does():
    """The class made of the first wrapper and SGD was given to all others, without their __init__."""

    def program():
        plain, expected = trained(mpisgd.DistributedOptimizer)
        own, found = trained(Counting)
        return type(plain).__name__, isinstance(plain, Counting), own.count, found, expected

    for name, is_counting, count, found, expected in run_ranks(2, program):
        assert (name, is_counting, count) == ("DistributedSGD", False, 1)
        assert found == expected == [[0.25, 0.25]]


@pytest.mark.parametrize("wrapped", [torch.optim.SGD, Own])
def test_a_step_of_the_users_subclass_is_entered_whatever_is_wrapped(wrapped):
    """That of the class made for an optimizer with two steps called the wrapped one past it."""

    def program():
        optimizer, found = trained(Counting, wrapped)
        return optimizer.count, found

    assert run_ranks(2, program) == [(1, [[0.25, 0.25]])] * 2
