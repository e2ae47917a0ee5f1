"""Ranks that start from different models, or with other settings, are told so at the first step."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd.optim import step_cycle

several = pytest.mark.mpi(min_size=2)


# Nothing said so: every rank applied the same gradients to a model of its own; the exit code was 0.


def train(strategy=None, lr=0.1, apart=True, group=None, **options):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    for param in model.parameters():
        nn.init.ones_(param)
    if apart:
        nn.init.constant_(model[1].weight, mpisgd.rank())
    opt = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), strategy=strategy, **options
    )
    model(torch.ones(1, 2).double()).sum().backward()
    return model, opt


@several
@pytest.mark.parametrize(
    "strategy",
    [
        None,
        mpisgd.LocalSGD(2),
        mpisgd.DiLoCo(2),
        mpisgd.ElasticAveraging(),
        mpisgd.Gossip(),
        mpisgd.Sharded(),
    ],
    ids=str,
)
def test_ranks_with_different_parameters_are_told(strategy):
    model, opt = train(strategy)
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        opt.step()
    everyone("first: 1.weight; 1 of 4" in caught.text and "broadcast_parameters" in caught.text, caught.text)
    mpisgd.broadcast_parameters(model)


@several
def test_those_who_mean_it_go_on_and_equal_ranks_hear_nothing():
    train(check_start=False)[1].step()
    model, opt = train()
    mpisgd.broadcast_parameters(model)
    opt.step()


@several
def test_models_that_differ_since_a_state_was_saved_go_on():
    def step(model, opt):
        opt.zero_grad()
        (model(torch.ones(1, 2).double()).sum() * (1 + mpisgd.rank())).backward()
        opt.step()

    ours, again = (train(mpisgd.LocalSGD(3), apart=False) for _ in range(2))
    for _ in range(2):
        step(*ours)
    for live, resumed in zip(ours, again, strict=True):
        resumed.load_state_dict(copy.deepcopy(live.state_dict()))
    for _ in range(2):  # the first of them ends with a mean
        step(*ours)
        step(*again)
        everyone(torch.equal(ours[0][0].weight, again[0][0].weight))


@several
@pytest.mark.parametrize("as_tensor", [False, True])
def test_settings_that_differ_are_named_with_their_values(as_tensor):
    lr = 0.125 if mpisgd.rank() == 0 else 0.5
    _, opt = train(lr=torch.tensor(lr) if as_tensor else lr, apart=False)
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        opt.step()
    everyone("'lr' of parameter group 0" in caught.text and "rank 0: 0.125" in caught.text, caught.text)


@several
def test_a_schedule_that_one_rank_does_not_follow_is_found_later():
    _, opt = train(apart=False)
    for _ in range(100):
        opt.step()
    if mpisgd.rank() == 0:
        opt.param_groups[0]["lr"] = 0.01
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        opt.step()
    everyone("'lr'" in caught.text and "0.01" in caught.text, caught.text)


def heard_in(num_steps, model, opt, change=lambda param: None):
    """Return the warnings of so many steps; `change` is done to each parameter after backward."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_steps):
            opt.zero_grad()
            model(torch.ones(1, 2).double()).sum().backward()
            for param in model.parameters():
                change(param)
            opt.step()
    return [str(each.message) for each in caught]


# Each rank trained a model of its own from there on, and the exit code was 0.
@several
@pytest.mark.processes
@pytest.mark.parametrize("strategy", [None, mpisgd.Sharded(), mpisgd.LocalSGD(2)], ids=str)
def test_ranks_that_come_apart_later_are_warned_once(strategy, monkeypatch):
    monkeypatch.setattr(step_cycle, "SETTINGS_EVERY", 10)  # of which steps is said by the test of a schedule
    model, opt = train(strategy, apart=False)
    everyone(heard_in(11, model, opt) == [])
    heard = heard_in(30, model, opt, lambda param: param.data.add_(mpisgd.rank()))
    may_differ = isinstance(strategy, mpisgd.LocalSGD)
    everyone(len(heard) == int(mpisgd.rank() == 0 and not may_differ), heard)
    everyone(all("the ranks have different parameters (first: 0.weight; 4 of 4)" in text for text in heard))


@several
@pytest.mark.processes
@pytest.mark.parametrize("strategy", [None, mpisgd.Sharded(stage=2), mpisgd.LocalSGD(2)], ids=str)
def test_an_optimizer_of_another_model_is_warned_of(strategy):
    other, opt = train(strategy, apart=False)
    everyone(heard_in(4, other, opt) == [])
    model = nn.Linear(2, 1).double()
    _, opt = train(strategy, apart=False)
    opt.zero_grad()
    heard = heard_in(4, model, opt)
    everyone(len(heard) == (mpisgd.rank() == 0), heard)
    everyone(all("none of its parameters has had a gradient in 3 steps" in text for text in heard), heard)


def one_bit(kind, lr=0.1, apart=True):
    params = [nn.Parameter(torch.full((2, 2), float(apart * mpisgd.rank()))) for _ in range(2)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params, kind(params, lr)


ONE_BIT = [
    pytest.param(lambda params, lr: mpisgd.OneBitAdam(params, lr, freeze_step=1), id="OneBitAdam"),
    pytest.param(lambda params, lr: mpisgd.OneBitLamb(params, lr, freeze_step=1), id="OneBitLamb"),
    pytest.param(lambda params, lr: mpisgd.ZeroOneAdam(params, lr, var_freeze_step=1), id="ZeroOneAdam"),
]


@several
@pytest.mark.parametrize("kind", ONE_BIT)
def test_optimizers_that_average_themselves_compare_parameters_and_settings(kind):
    params, opt = one_bit(kind)
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        opt.step()
    everyone("ranks start from different parameters" in caught.text, caught.text)
    mpisgd.broadcast_parameters((str(i), param) for i, param in enumerate(params))
    opt.step()
    _, opt = one_bit(kind, apart=False)
    opt.param_groups[0]["lr"] = 0.1 * (1 + mpisgd.rank())
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        opt.step()
    everyone("the setting 'lr' of parameter group 0 differs" in caught.text, caught.text)


@several
def test_models_that_differ_between_two_meetings_of_zero_one_adam_go_on():
    def made():
        params = [nn.Parameter(torch.ones(4, dtype=torch.float64))]
        return params, mpisgd.ZeroOneAdam(
            params, 0.1, var_freeze_step=1, local_step_scaler=1, local_step_clipper=4
        )

    def step(params, opt):
        params[0].grad = torch.full((4,), 1.0 + mpisgd.rank(), dtype=torch.float64)
        opt.step()

    ours, again = made(), made()
    step(*ours)
    while ours[1].is_synchronized:
        step(*ours)
    with torch.no_grad():
        again[0][0].copy_(ours[0][0])
    again[1].load_state_dict(copy.deepcopy(ours[1].state_dict()))
    for _ in range(5):
        step(*ours)
        step(*again)
        everyone(torch.equal(ours[0][0], again[0][0]))
