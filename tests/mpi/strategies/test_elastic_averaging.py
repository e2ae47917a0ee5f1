"""`ElasticAveraging`, which is its paper in tests/unit/methods."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from trainings import STEPS, batch, close, fresh_model, one_step, sgd, snapshot, wrapped
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import ElasticAveraging
from mpisgd.compress import OneBit, RandomK, TopK
from mpisgd.errors import InvalidArgument
from mpisgd.methods.elastic_averaging import paper
from mpisgd.tools.verification.paper_run import Definition, PaperRun, gradients


def test_consensus_is_the_centre_and_gives_the_own_model_back():
    models = [fresh_model() for _ in range(mpisgd.size())]
    params = {rank: dict(each.named_parameters()) for rank, each in enumerate(models)}
    run = PaperRun(
        Definition(paper.ElasticAveraging(tau=3)),
        params,
        {rank: sgd(list(mine.values())) for rank, mine in params.items()},
    )
    model, optimizer = wrapped(sgd, ElasticAveraging(every=3))
    for step in range(1, STEPS + 1):
        one_step(model, optimizer, mpisgd.rank(), step)
        losses = [each(batch(rank, step)).square().mean() for rank, each in enumerate(models)]
        run.step({rank: gradients(loss, params[rank]) for rank, loss in enumerate(losses)})
    own, centre = list(run.x[mpisgd.rank()].values()), list(run.state.z.values())
    close(model, own)
    with optimizer.consensus():
        close(model, centre)
        same_on_all_ranks([param.tolist() for param in model.parameters()])
    close(model, own)


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


@pytest.mark.parametrize("compression", [TopK(0.05), RandomK(0.1), OneBit()], ids=repr)
def test_the_centre_comes_to_the_mean_of_the_targets_with_error_feedback(compression):
    # What was not sent was in the residual and in the next difference, too: RandomK(0.1) came to 1e8.
    draw = torch.Generator().manual_seed(3)
    targets = 2 * torch.rand(mpisgd.size(), 200, generator=draw) - 1
    param = torch.nn.Parameter(torch.zeros(200))
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.1), strategy=ElasticAveraging(every=4), compression=compression
    )
    farthest = 0.0
    for _ in range(200):
        param.grad = param.detach() - targets[mpisgd.rank()]
        optimizer.step()
        farthest = max(farthest, param.abs().max().item())
    with optimizer.consensus():
        off = (param - targets.mean(0)).abs().max().item()
        same_on_all_ranks(param.tolist())
    everyone(farthest <= 1 and off < 0.6, f"{farthest}, {off}")


@pytest.mark.parametrize("lost", ["one rank's own", "the compressor"])
def test_a_mean_that_has_arrived_in_part_begins_anew_where_residuals_are_lost(lost):
    # The mean that has arrived lacks what is in the residuals: without these it would be off for ever.
    target = torch.linspace(-1, 1, 40) * (mpisgd.rank() + 1)
    mean = torch.linspace(-1, 1, 40) * (mpisgd.size() + 1) / 2

    def made(compression):
        param = torch.nn.Parameter(torch.zeros(40))
        sgd = torch.optim.SGD([param], lr=0.1)
        return param, mpisgd.DistributedOptimizer(sgd, strategy=ElasticAveraging(), compression=compression)

    def train(param, optimizer, steps):
        for _ in range(steps):
            param.grad = param.detach() - target
            optimizer.step()

    param, optimizer = made(TopK(0.05))
    train(param, optimizer, 5)
    state = copy.deepcopy(optimizer.state_dict())
    if lost == "one rank's own" and mpisgd.rank() == 0:
        state["mpisgd"]["own"] = None
    again, resumed = made(TopK(0.05) if lost != "the compressor" else OneBit())
    again.data.copy_(param.data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        resumed.load_state_dict(state)
    train(again, resumed, 250)
    with resumed.consensus():
        off = (again - mean).abs().max().item()
    everyone(off < 0.1, f"{off}")


@pytest.mark.mpi(min_size=2)
def test_a_force_that_overshoots_is_refused():
    with raises_everywhere(InvalidArgument) as caught:
        wrapped(sgd, ElasticAveraging(alpha=0.9))
    everyone(f"at most 1 / {mpisgd.size()}" in caught.text, caught.text)


@pytest.mark.parametrize("arguments", [{"alpha": 0}, {"alpha": -1.0}, {"every": 0}])
def test_wrong_arguments_are_named(arguments):
    with pytest.raises(InvalidArgument, match="ElasticAveraging"):
        ElasticAveraging(**arguments)
