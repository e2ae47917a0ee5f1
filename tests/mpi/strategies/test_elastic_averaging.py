"""`ElasticAveraging` is EASGD and EAMSGD, simulated in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from simulation import STEPS, Simulated, close, one_step, sgd, snapshot, wrapped
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import ElasticAveraging
from mpisgd.errors import InvalidArgument


def plain(params):
    return torch.optim.SGD(params, lr=0.1)


def eamsgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(("make", "every", "alpha"), [(plain, 1, None), (plain, 3, 0.1), (eamsgd, 4, None)])
def test_it_equals_its_simulation(make, every, alpha):
    size = mpisgd.size()
    simulated, force = Simulated(make), alpha or 0.9 / size
    centre = [same[0].detach().clone() for same in simulated.alike()]
    model, optimizer = wrapped(make, ElasticAveraging(alpha, every))
    for step in range(1, STEPS + 1):
        one_step(model, optimizer, mpisgd.rank(), step)
        simulated.step(step)
        if step % every == 0:
            with torch.no_grad():
                for i, same in enumerate(simulated.alike()):
                    differences = [param - centre[i] for param in same]
                    for param, difference in zip(same, differences, strict=True):
                        param.sub_(force * difference)
                    centre[i] = centre[i] + force * torch.stack(differences).sum(0)
    close(model, simulated.mine())
    with optimizer.consensus():
        close(model, centre)
        same_on_all_ranks([param.tolist() for param in model.parameters()])
    close(model, simulated.mine())


def test_a_training_that_is_saved_goes_on_as_if_it_was_not():
    strategy = ElasticAveraging(every=3)
    model, optimizer = wrapped(sgd, strategy)
    again, resumed = wrapped(sgd, strategy)
    for step in range(1, 13):
        one_step(model, optimizer, mpisgd.rank(), step)
        if step == 7:
            again.load_state_dict(model.state_dict())
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif step > 7:
            one_step(again, resumed, mpisgd.rank(), step)
    close(again, snapshot(model), 0.0)


@pytest.mark.mpi(min_size=2)
def test_a_force_that_overshoots_is_refused():
    with raises_everywhere(InvalidArgument) as caught:
        wrapped(sgd, ElasticAveraging(alpha=0.9))
    everyone(f"at most 1 / {mpisgd.size()}" in caught.text, caught.text)


@pytest.mark.parametrize("arguments", [{"alpha": 0}, {"alpha": -1.0}, {"every": 0}])
def test_wrong_arguments_are_named(arguments):
    with pytest.raises(InvalidArgument, match="ElasticAveraging"):
        ElasticAveraging(**arguments)
