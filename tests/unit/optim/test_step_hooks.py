"""An optimizer whose class calls the step of its parent, of which there have been some, makes one step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks

STEPS = 5


class Own(torch.optim.SGD):
    """A step of a subclass; torch runs hooks in it and in that of its parent."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("in the middle of a step")
        return super().step(closure)


def trained(kind: type[torch.optim.Optimizer], strategy: Any, closures: bool = False) -> torch.Tensor:
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # from here on torch wraps its step
    param = torch.nn.Parameter(torch.arange(4.0))
    optimizer: Any = mpisgd.DistributedOptimizer(kind([param], lr=0.5, momentum=0.5), strategy=strategy)

    def backward(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((mpisgd.rank() + 1.0 + step) * param).sum()
        loss.backward()
        return loss.detach()

    for step in range(STEPS):
        if closures:
            optimizer.step(lambda s=step: backward(s))
        else:
            backward(step)
            optimizer.step()
    if isinstance(strategy, mpisgd.ParameterServer):
        optimizer.synchronizer.finish()
    else:
        assert optimizer.synchronizer.num_steps == STEPS
    return param.detach().clone()


STRATEGIES = [
    mpisgd.Synchronous(),
    mpisgd.LocalSGD(2),
    mpisgd.DiLoCo(3),
    mpisgd.Gossip("ring"),
    mpisgd.ParameterServer("ssp", staleness_steps=0),
]


@pytest.mark.parametrize("closures", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_ranks_end_as_with_the_parent_itself(strategy, closures):
    """LocalSGD(2) averaged after every step; a server's worker waited for the lock that it had."""
    expected = run_ranks(3, lambda: trained(torch.optim.SGD, strategy, closures), seed=1)
    for found, right in zip(
        run_ranks(3, lambda: trained(Own, strategy, closures), seed=1), expected, strict=True
    ):
        torch.testing.assert_close(found, right)


def test_a_step_that_raises_is_over():
    def program() -> None:
        torch.optim.SGD([torch.zeros(1)], lr=1.0)
        param = torch.nn.Parameter(torch.zeros(2))
        optimizer: Any = mpisgd.DistributedOptimizer(Own([param], lr=1.0), strategy=mpisgd.LocalSGD(2))
        for fails in (False, True, False):
            optimizer.fails = fails
            optimizer.zero_grad()
            ((mpisgd.rank() + 1.0) * param).sum().backward()
            if fails:
                with pytest.raises(ArithmeticError):
                    optimizer.step()
            else:
                optimizer.step()
        assert optimizer.synchronizer.num_steps == 2
        assert param.tolist() == [-3.0] * 2  # the mean of -2 and -4

    run_ranks(2, program)


def test_a_copy_is_one_of_the_class_that_was_wrapped():
    def program() -> None:
        torch.optim.SGD([torch.zeros(1)], lr=1.0)
        optimizer = mpisgd.DistributedOptimizer(Own([torch.nn.Parameter(torch.zeros(2))], lr=1.0))
        other = copy.deepcopy(optimizer)
        assert type(other) is Own
        other.step()

    run_ranks(1, program)
