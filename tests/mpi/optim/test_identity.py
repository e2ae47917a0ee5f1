"""Operations say whose they are: optimizers of equal shapes never meet, and a message names both."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from verdicts import everyone, raises_everywhere

import mpisgd

several = pytest.mark.mpi(min_size=2)


def two_models():
    return nn.Linear(2, 3), nn.Linear(2, 3)


def fill(model, value):
    for param in model.parameters():
        param.grad = torch.full_like(param, value + mpisgd.rank())


# A rank that was in one optimizer while another rank was in a second one of equal shapes got the gradients,
# parameters or barriers of the wrong one, in silence: nothing that ranks compared told them apart.


@several
def test_average_gradients_of_two_models_of_equal_shapes_do_not_meet():
    models = two_models()
    for model in models:  # so that both have a plan
        fill(model, 1.0)
        mpisgd.average_gradients(model)
    fill(models[0], 10.0), fill(models[1], 20.0)
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        mpisgd.average_gradients(models[mpisgd.rank() == 0])
    everyone("average_gradients" in caught.text and "(Linear, 2 parameters" in caught.text, caught.text)
    mine = models[mpisgd.rank() == 0].weight.grad
    everyone(bool((mine == mine.flatten()[0]).all()), f"reduced: {mine}")


@several
@pytest.mark.parametrize(
    "strategy",
    [
        mpisgd.LocalSGD(sync_every=1),
        mpisgd.Gossip(),
        mpisgd.DiLoCo(sync_every=1),
        mpisgd.ElasticAveraging(),
        mpisgd.Sharded(),
        None,
    ],
    ids=str,
)
def test_steps_of_two_optimizers_of_equal_shapes_do_not_meet(strategy):
    models = two_models()
    opts = [
        mpisgd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), strategy=strategy
        )
        for model in models
    ]
    for model in models:
        mpisgd.broadcast_parameters(model)
    for model, opt in zip(models, opts, strict=True):
        fill(model, 1.0)
        opt.step()
    for model, opt in zip(models, opts, strict=True):
        opt.zero_grad()
        fill(model, 2.0)
    first = mpisgd.rank() == 0
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        opts[first].step()
        opts[not first].step()
    everyone(caught.text.count("(SGD, 2 parameters from 'weight')") == 2, caught.text)


@several
def test_optimizers_that_average_in_their_step_do_not_meet():
    models = two_models()
    for model in models:
        mpisgd.broadcast_parameters(model)
    opts = [mpisgd.OneBitAdam(model.parameters(), lr=0.1, freeze_step=1) for model in models]
    for _ in range(2):
        for model, opt in zip(models, opts, strict=True):
            fill(model, 1.0)
            opt.step()
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        opts[mpisgd.rank() == 0].step()
    everyone(caught.text.count("(OneBitAdam, 2 parameters") == 2, caught.text)
