"""What `mpisgd.verify`, and the comparison of programs, say where there is nothing to compare with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpisgd
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks
from mpisgd.tools.verification.programs.compare import difference, judge, observe
from mpisgd.tools.verification.programs.events import Step
from mpisgd.tools.verification.programs.execute import Failure, Run
from mpisgd.tools.verification.programs.program import Layer, Optimizer, Program


def batches(dtype=torch.float64, alike=False):
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        inputs, targets = torch.randn(12, 5, generator=draw), torch.randn(12, 2, generator=draw)
        if alike:
            inputs, targets = inputs[:6].repeat(2, 1), targets[:6].repeat(2, 1)
        found.append((inputs.to(dtype), targets.to(dtype)))
    return found


def model(*, dtype=torch.float64, drops=False):
    torch.manual_seed(0)  # so that a training with dropout repeats itself
    dropout = [nn.Dropout()] if drops else []
    return nn.Sequential(nn.Linear(5, 7), *dropout, nn.ReLU(), nn.Linear(7, 2)).to(dtype)


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def found(*, dtype=torch.float64, drops=False, alike=False, lr=0.1, alone=False, **options):
    """Return what two ranks are told, which must be the same."""

    def program():
        groups = [mpisgd.new_group([rank]) for rank in range(mpisgd.size())] if alone else [None] * 2
        return mpisgd.verify(
            lambda: model(dtype=dtype, drops=drops),
            lambda params: torch.optim.SGD(params, lr=lr),
            loss,
            batches(dtype, alike),
            **({"group": groups[mpisgd.rank()]} if alone else {}),
            **options,
        )

    one, other = run_ranks(2, program)
    assert one == other
    return one


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ranks_that_do_not_communicate_are_different_in_every_dtype(dtype):
    assert found(dtype=dtype)
    silent = found(dtype=dtype, alone=True)
    assert not silent
    assert silent.step == 0


def test_dropout_is_refused_though_the_training_repeats_itself():
    with pytest.raises(RankFailed, match=r"random, as dropout is; switch it off by model.eval\(\), or seed"):
        found(drops=True)


def test_what_is_not_finite_is_refused():
    with pytest.raises(RankFailed, match="not finite from step 1 on"):
        found(lr=1e200)


@pytest.mark.parametrize(
    "case", [{"lr": 0.0}, {"alike": True}, {"strategy": mpisgd.LocalSGD(50)}], ids=["lr", "data", "short"]
)
def test_what_cannot_be_told_is_not_verified(case):
    told = found(**case)
    assert not told
    assert str(told).startswith("cannot tell")


PROGRAM = Program(0, 1, 0, False, (Layer(dtype="float32"),), (Optimizer("SGD"),), (Step(), Step()))


def run_of(*values):
    return Run({event: [torch.tensor([value])] for event, value in enumerate(values, -1)})


def test_a_difference_is_never_more_than_a_hundredth_of_what_a_step_moved():
    """Of float32 parts 1e-5 may be drift: where a step moves 1e-6, that says nothing."""
    right = run_of(1.0, 1.1, 1.1 + 1e-6)
    assert difference(PROGRAM, run_of(1.0, 1.1 + 5e-6, 1.1 + 1e-6), right) == ""
    assert difference(PROGRAM, run_of(1.0, 1.1, 1.1), right) != ""


def test_trainings_that_are_not_finite_alike_say_nothing():
    outcome = observe(PROGRAM, run_of(1.0, float("nan")), None, [("renamed", run_of(1.0, float("nan")))])
    assert "not finite" in outcome.wrong


def test_a_reference_that_fails_where_the_training_does_not_is_no_equality():
    failed = run_of(1.0)
    failed.failure = Failure(0, "NotImplementedError", "no such kernel")
    outcome = observe(PROGRAM, run_of(1.0, 1.1), failed, ())
    assert judge([outcome], ranks_agree=True).kind == "no reference"
