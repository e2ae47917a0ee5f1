"""`strategy=`: a user's own is called at its moments, and all ranks must have chosen the same one."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from examples import example
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd.errors import CollectiveMismatch, InvalidArgument
from mpisgd.methods.local_sgd.paper import LocalSGD
from mpisgd.tools.verification.paper_run import Definition, PaperRun, gradients


def batch(rank: int, step: int) -> torch.Tensor:
    """[4, 8], different for every rank and step."""
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def fresh_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(batch(rank, step)).square().mean().backward()
    optimizer.step()


def by_paper(size: int, num_steps: int) -> list[torch.Tensor]:
    """This rank's parameters after `num_steps` of local SGD, averaged every 4 steps."""
    models = [fresh_model() for _ in range(size)]
    params = {rank: dict(model.named_parameters()) for rank, model in enumerate(models)}
    optimizers = {rank: torch.optim.SGD(p.values(), lr=0.1, momentum=0.9) for rank, p in params.items()}
    run = PaperRun(Definition(LocalSGD(H=4)), params, optimizers)
    for step in range(1, num_steps + 1):
        losses = [model(batch(rank, step)).square().mean() for rank, model in enumerate(models)]
        run.step({rank: gradients(loss, params[rank]) for rank, loss in enumerate(losses)})
    return list(run.x[mpisgd.rank()].values())


@pytest.mark.parametrize("num_steps", [6, 8])
def test_the_documented_strategy_is_local_sgd(num_steps):
    strategy = example("strategy")["AverageEvery"](steps=4)
    model = fresh_model()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy=strategy
    )
    for step in range(1, num_steps + 1):
        one_step(model, optimizer, mpisgd.rank(), step)
    expected = by_paper(mpisgd.size(), num_steps)
    everyone(
        all(
            torch.allclose(a, b, rtol=0, atol=1e-12)
            for a, b in zip(model.parameters(), expected, strict=True)
        ),
        f"{[(a - b).abs().max().item() for a, b in zip(model.parameters(), expected, strict=True)]}",
    )
    if num_steps % 4 == 0:
        same_on_all_ranks([param.tolist() for param in model.parameters()])


@pytest.mark.mpi(min_size=2)
def test_between_two_averages_the_models_differ():
    strategy = example("strategy")["AverageEvery"](steps=4)
    model = fresh_model()
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    one_step(model, optimizer, mpisgd.rank(), 1)
    with raises_everywhere(mpisgd.OutOfSync):
        mpisgd.check_in_sync(model)


@pytest.mark.mpi(min_size=2)
def test_other_arguments_on_one_rank_are_found_at_construction():
    kind = example("strategy")["AverageEvery"]
    model = fresh_model()
    with raises_everywhere(CollectiveMismatch) as caught:
        mpisgd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), strategy=kind(steps=4 + mpisgd.rank() % 2)
        )
    everyone("AverageEvery(steps=5)" in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_one_rank_without_the_strategy_is_found_too():
    kind = example("strategy")["AverageEvery"]
    strategy = kind(steps=4) if mpisgd.rank() else None
    model = fresh_model()
    with raises_everywhere(CollectiveMismatch) as caught:
        mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    everyone("Synchronous()" in caught.text, caught.text)


def test_synchronous_is_the_default():
    models = fresh_model(), fresh_model()
    optimizers = [
        mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
        for model, options in zip(models, ({}, {"strategy": mpisgd.Synchronous()}), strict=True)
    ]
    everyone(all(optimizer.strategy == mpisgd.Synchronous() for optimizer in optimizers))
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            one_step(model, optimizer, mpisgd.rank(), step)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    everyone(all(torch.equal(a, b) for a, b in pairs))


def test_shared_parameters_go_with_synchronous_alone():
    strategy = example("strategy")["AverageEvery"](steps=4)
    model = fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        InvalidArgument, match=r"share_parameters=True does not go with AverageEvery\(steps=4\)"
    ):
        mpisgd.DistributedOptimizer(optimizer, strategy=strategy, share_parameters=True)
    everyone(type(optimizer) is torch.optim.SGD)


@pytest.mark.parametrize("wrong", ["synchronous", mpisgd.Synchronous, 3])
def test_what_is_no_strategy_is_refused(wrong):
    model = fresh_model()
    with pytest.raises(InvalidArgument, match="strategy="):
        mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy=wrong)


@dataclass(frozen=True)
class Noting(mpisgd.Strategy):
    """Writes down when it is called."""

    def synchronizer(self, training):
        return _Notes(training)


class _Notes(mpisgd.Synchronizer):
    def __init__(self, training):
        super().__init__(training)
        self.called: list[object] = []

    def before_step(self):
        self.called.append("before_step")

    def around(self, closure):
        self.called.append("around")
        return closure

    def after_step(self, num_steps):
        self.called.append(("after_step", num_steps))

    def before_zero_grad(self):
        self.called.append("before_zero_grad")

    def loaded(self, state_dict):
        self.called.append("loaded")

    def extend(self, named):
        super().extend(named)
        self.called.append(("extend", len(named)))


@pytest.mark.parametrize(
    "options",
    [
        {"op": "SUM"},
        {"compression": mpisgd.Compression.fp16},
        {"compression": mpisgd.compress.TopK(0.5)},
        {"gradient_predivide_factor": 2.0},
        {"error_if_nonfinite": True},
        {"check_in_sync_every": 2},
        {"named_buffers": [("running", torch.zeros(2))]},
        {"share_parameters": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_strategy_that_declares_nothing_goes_with_no_option(options):
    """It would leave out what it was asked for, and say nothing."""
    sgd = torch.optim.SGD(fresh_model().parameters(), lr=0.1)
    with raises_everywhere(InvalidArgument) as caught:
        mpisgd.DistributedOptimizer(sgd, strategy=Noting(), **options)
    everyone("its goes_with does not declare it" in caught.text, caught.text)


def test_a_synchronizer_is_called_at_its_moments():
    model, later = fresh_model(), torch.nn.Linear(2, 2)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy=Noting())
    notes = optimizer._synchronizer.called
    one_step(model, optimizer, mpisgd.rank(), 1)
    optimizer.step(lambda: None)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": list(later.parameters())})
    everyone(
        notes
        == [
            *("before_zero_grad", "before_step", ("after_step", 1)),
            *("around", "before_step", ("after_step", 2)),
            *("loaded", ("extend", 6)),
        ],
        str(notes),
    )


@pytest.mark.parametrize("strategy", [mpisgd.Synchronous(), Noting()])
def test_a_forgotten_optimizer_is_gone_at_once(strategy):
    """Its hooks would go on reducing, on each rank until its garbage collector comes by."""
    model = fresh_model()
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    one_step(model, optimizer, mpisgd.rank(), 1)
    forgotten = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        everyone(forgotten() is None)
    finally:
        gc.enable()
