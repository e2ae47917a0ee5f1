"""A step that raises leaves nothing behind: the next one does what it would have done without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks


class Failing(torch.optim.SGD):
    """Raises in a step where it is told to, before it has changed anything."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("in the middle of a step")
        return super().step(closure)


class AfterHooks(torch.optim.Optimizer):
    """SGD of torch's hooks and one step, which raises where it is told to."""

    fails = False

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("in the middle of a step")
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])


def backward(param: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    loss = (factor * (mpisgd.rank() + 1.0) * torch.arange(1.0, 5.0) * param).sum()
    loss.backward()
    return loss


STRATEGIES = {
    "gossip": lambda folder: mpisgd.Gossip("complete", style="combine_then_adapt"),
    "files": lambda folder: mpisgd.Sharded(1, offload=mpisgd.Offload(folder)),
}


@pytest.mark.parametrize("case", STRATEGIES)
def test_a_step_with_a_closure_that_is_refused_is_followed_by_one_without(case, tmp_path):
    strategy = STRATEGIES[case](str(tmp_path))

    def program(refused: bool) -> list[float]:
        param = torch.nn.Parameter(torch.full((4,), float(refused and mpisgd.rank())))
        optimizer: Any = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), strategy=strategy)
        if refused:
            with pytest.raises(mpisgd.CollectiveMismatch):
                optimizer.step(lambda: backward(param))
            with torch.no_grad():
                param.zero_()
        backward(param)
        optimizer.step()
        return param.tolist()

    assert run_ranks(2, lambda: program(True)) == run_ranks(2, lambda: program(False))


@pytest.mark.parametrize("kind", [Failing, AfterHooks])
def test_gradients_count_as_much_in_a_step_that_is_taken_again(kind):
    def program() -> list[float]:
        param = torch.nn.Parameter(torch.zeros(4))
        optimizer: Any = mpisgd.DistributedOptimizer(
            kind([param], lr=1.0), strategy=mpisgd.ParameterServer("async", locked=False)
        )
        backward(param)
        optimizer.fails = True
        with pytest.raises(ArithmeticError):
            optimizer.step()
        optimizer.fails = False
        optimizer.step()
        optimizer.synchronizer.finish()
        return param.tolist()

    assert run_ranks(2, program) == [[-1.5, -3.0, -4.5, -6.0]] * 2


@pytest.mark.parametrize("kind", [Failing, AfterHooks])
@pytest.mark.parametrize("strategy", [mpisgd.Sharded(1), mpisgd.Sharded(2)], ids=repr)
def test_after_a_step_that_raised_the_groups_have_the_parameters(kind, strategy):
    """A program that resets gradients by the groups reset those of pieces, and what it computed was added."""

    def program() -> list[float]:
        param = torch.nn.Parameter(torch.zeros(4))
        optimizer: Any = mpisgd.DistributedOptimizer(kind([param], lr=1.0), strategy=strategy)
        for factor, fails in ((1.0, True), (10.0, False)):
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.grad = None
            backward(param, factor)
            optimizer.fails = fails
            if fails:
                with pytest.raises(ArithmeticError):
                    optimizer.step()
                assert optimizer.param_groups[0]["params"][0] is param
            else:
                optimizer.step()
        return param.tolist()

    assert run_ranks(2, program) == [[-15.0, -30.0, -45.0, -60.0]] * 2


def test_after_a_step_that_raised_behind_a_server_the_groups_have_the_parameters():
    class Late(torch.optim.SGD):
        """Raises where the servers have been updated, and nothing is left to do."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if not any(group["params"] for group in self.param_groups):
                raise ArithmeticError("in the middle of a step")
            return super().step(closure)

    def program() -> bool:
        param = torch.nn.Parameter(torch.zeros(4))
        optimizer: Any = mpisgd.DistributedOptimizer(
            Late([param], lr=1.0), strategy=mpisgd.ParameterServer("async")
        )
        backward(param)
        with pytest.raises(ArithmeticError):
            optimizer.step()
        optimizer.synchronizer.finish()
        return optimizer.param_groups[0]["params"][0] is param

    assert run_ranks(2, program) == [True, True]


def test_after_a_step_that_raised_in_join_ranks_without_data_hear_of_the_next_collective():
    def program() -> list[float]:
        param = torch.nn.Parameter(torch.zeros(4))
        optimizer: Any = mpisgd.DistributedOptimizer(AfterHooks([param], lr=1.0))
        told = torch.ones(1)
        with mpisgd.join(optimizer):
            backward(param)
            optimizer.fails = True
            with pytest.raises(ArithmeticError):
                optimizer.step()
            optimizer.fails = False
            if mpisgd.rank() == 0:
                mpisgd.all_reduce(told)
        return told.tolist()

    assert run_ranks(2, program) == [[1.0], [1.0]]
