"""`DiLoCo`, which is its paper in tests/unit/methods."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from trainings import STEPS, close, one_step, sgd, snapshot, trained, wrapped
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import DiLoCo
from mpisgd.errors import InvalidArgument


@pytest.mark.parametrize("numels", [[100, 1, 1], [1, 100, 1], [1, 1, 100], [1, 1, 1, 100, 1]])
def test_a_parameter_larger_than_a_fragment_leaves_none_empty(numels):
    """The outer optimizer got an empty list, and the message told of wrong `outer_options`."""
    params = [torch.nn.Parameter(torch.zeros(numel)) for numel in numels]
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(params, lr=0.5), strategy=DiLoCo(6, fragments=3))
    synchronised = []
    for _ in range(6):
        for param in params:
            param.grad = torch.full_like(param, float(mpisgd.rank() + 1))
        before = [param.detach().clone() for param in params]
        optimizer.step()
        moved = [not torch.equal(p, b - 0.5 * p.grad) for p, b in zip(params, before, strict=True)]
        synchronised.append([place for place, is_moved in enumerate(moved) if is_moved])
    # The fragments after steps 2, 4 and 6: each has something, and together they have all.
    assert not any(synchronised[::2]), synchronised
    assert all(synchronised[1::2]), synchronised
    assert sorted(itertools.chain(*synchronised)) == list(range(len(numels))), synchronised


def test_more_fragments_than_parameters_are_refused():
    params = [torch.nn.Parameter(torch.zeros(3))]
    with raises_everywhere(InvalidArgument) as caught:
        mpisgd.DistributedOptimizer(torch.optim.SGD(params, lr=0.5), strategy=DiLoCo(6, fragments=2))
    everyone("fragments=2, and the optimizer has 1 parameters" in caught.text, caught.text)


def test_an_outer_step_of_one_is_the_mean_of_the_models():
    strategy = DiLoCo(4, outer_options={"lr": 1.0})
    close(trained(sgd, strategy), snapshot(trained(sgd, mpisgd.LocalSGD(4))))


def test_any_outer_optimizer_does():
    model = trained(sgd, DiLoCo(4, outer_optimizer=torch.optim.Adam, outer_options={"lr": 0.01}))
    same_on_all_ranks([param.tolist() for param in model.parameters()])


@pytest.mark.parametrize("saved_at", [8, 9])
def test_a_training_that_is_saved_goes_on_as_if_it_was_not(saved_at):
    strategy = DiLoCo(6, fragments=2, overlap_steps=3)
    model, optimizer = wrapped(sgd, strategy)
    again, resumed = wrapped(sgd, strategy)
    for step in range(1, STEPS + 1):
        one_step(model, optimizer, mpisgd.rank(), step)
        if step == saved_at:
            again.load_state_dict(model.state_dict())
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif step > saved_at:
            one_step(again, resumed, mpisgd.rank(), step)
    close(again, snapshot(model), 0.0)


def test_a_state_without_the_strategy_is_taken_over():
    model, optimizer = wrapped(sgd, DiLoCo(4))
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    one_step(model, plain, 0, 1)
    optimizer.load_state_dict(plain.state_dict())
    everyone(optimizer.param_groups[0]["lr"] == 0.05)
    one_step(model, optimizer, mpisgd.rank(), 2)


def test_added_parameters_are_synchronised_too():
    model, optimizer = wrapped(sgd, DiLoCo(4))
    added = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    for step in range(1, 9):
        if step == 3:
            optimizer.add_param_group({"params": [added]})
        added.grad = torch.full_like(added, float(mpisgd.rank() + step))
        one_step_keeping(model, optimizer, step)
    same_on_all_ranks(added.tolist())
    everyone(bool((added != 0).all()))


def one_step_keeping(model, optimizer, step):
    """As `one_step`, without resetting gradients before."""
    model.zero_grad()
    model(torch.full((2, 8), float(step + mpisgd.rank()), dtype=torch.float64)).square().mean().backward()
    optimizer.step()


def test_consensus_is_the_outer_model():
    model, optimizer = wrapped(sgd, DiLoCo(4))
    for step in range(1, 7):
        one_step(model, optimizer, mpisgd.rank(), step)
        if step == 4:
            after = snapshot(model)
    with optimizer.consensus():
        close(model, after, 0.0)


@pytest.mark.mpi(min_size=2)
def test_another_outer_learning_rate_on_one_rank_is_found():
    options = {"lr": 0.5 if mpisgd.rank() else 0.7}
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        wrapped(sgd, DiLoCo(4, outer_options=options))
    everyone("'lr': 0.5" in caught.text, caught.text)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sync_every": 0},
        {"sync_every": 4, "overlap_steps": 4},
        {"sync_every": 4, "fragments": 5},
        {"sync_every": 4, "outer_optimizer": "sgd"},
        {"sync_every": 4, "outer_options": {"learning_rate": 3}},
        {"sync_every": 4, "overlap_alpha": 2},
    ],
)
def test_wrong_arguments_are_named(arguments):
    with pytest.raises(InvalidArgument, match="DiLoCo"):
        DiLoCo(**arguments)
