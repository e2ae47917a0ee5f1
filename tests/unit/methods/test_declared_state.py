"""What methods declare of their state and of what it belongs to, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import mpisgd
from mpisgd import Gossip, ParameterServer
from mpisgd.compress.compressor import has_momentum
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.method_state import alike
from mpisgd.methods.paper_kit import Vec
from mpisgd.methods.strategy.local_training import LocalSynchronizer


@dataclass
class Kept:
    x: Vec = alike(default_factory=Vec, begin="copy")
    v: Vec = alike(default_factory=Vec, begin="zeros")
    number: int = alike(0)


class Keeper(LocalSynchronizer):
    def synchronize(self) -> None:
        self.state.number += 1


@dataclass(frozen=True)
class Keeping(mpisgd.Strategy):
    keeps = Kept

    def synchronizer(self, training):
        return Keeper(training, self)


def stepped(optimizer, *params) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


def test_entries_begin_as_they_are_declared_also_those_that_are_added_and_loaded():
    def program() -> None:
        first, added = (torch.nn.Parameter(torch.full((3,), mpisgd.rank() + value)) for value in (1.0, 5.0))
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.SGD([first], lr=0.5), strategy=Keeping(), check_start=False
        )
        stepped(optimizer, first)
        optimizer.add_param_group({"params": [added]})
        stepped(optimizer, first, added)
        state = optimizer.synchronizer.state
        assert {key: value.tolist() for key, value in state.x.items()} == {"0": [1.0] * 3, "1": [5.0] * 3}
        assert {key: value.tolist() for key, value in state.v.items()} == {"0": [0.0] * 3, "1": [0.0] * 3}
        saved = optimizer.state_dict()
        assert type(saved["mpisgd"]["alike"]["x"]) is dict  # which others can read without this package
        state.x["0"] += 1
        optimizer.load_state_dict(saved)
        loaded = optimizer.synchronizer.state
        assert type(loaded.x) is Vec
        assert loaded.number == 2
        assert loaded.x["0"].tolist() == state.x["0"].tolist()

    run_ranks(2, program)


@pytest.mark.parametrize("num_steps", [2, 3, 5])
def test_what_was_accrued_before_a_load_does_not_count(num_steps):
    """A worker pushed it with its next period, and began that in the middle of the one before."""

    def program() -> None:
        params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
        made = [
            mpisgd.DistributedOptimizer(
                torch.optim.SGD([param], lr=0.5, momentum=0.9),
                strategy=ParameterServer("async", push_every=4, pull_every=2),
            )
            for param in params
        ]
        for _ in range(num_steps):
            stepped(made[0], params[0])
        with torch.no_grad():
            params[1].copy_(params[0])
        saved = made[0].state_dict()
        for optimizer, param in zip(made, params, strict=True):
            optimizer.load_state_dict(saved)
            for _ in range(3):
                stepped(optimizer, param)
            optimizer.synchronizer.finish()
        assert params[0].tolist() == params[1].tolist(), params

    run_ranks(1, program)


def test_a_strategy_is_checked_again_for_other_ranks():
    """More ranks made the centre diverge."""

    def program() -> None:
        groups = [mpisgd.new_group([first, first + 1]) for first in (0, 2)]
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.SGD([param], lr=0.5),
            strategy=mpisgd.ElasticAveraging(every=1, alpha=0.4),
            group=groups[mpisgd.rank() // 2],
        )
        stepped(optimizer, param)
        with pytest.raises(mpisgd.InvalidArgument, match=r"alpha=0.4 with 4 ranks"):
            optimizer.rebuild()
        stepped(optimizer, param)  # as before: nothing has changed

    run_ranks(4, program)


def test_exchanges_go_on_where_parameters_cannot_be_added():
    """They had ended, without a word, before the error said why."""

    def program() -> None:
        model = torch.nn.Linear(3, 2)
        mpisgd.broadcast_parameters(model)
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), strategy=Gossip("ring", style="asynchronous")
        )
        stepped(optimizer, *model.parameters())
        model.double()
        with pytest.raises(mpisgd.InvalidArgument, match="convert the model before"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        model.float()
        model.zero_grad()
        stepped(optimizer, *model.parameters())
        assert optimizer.synchronizer._averaging is not None
        optimizer.rebuild()

    run_ranks(2, program)


@pytest.mark.parametrize(
    ("compressor", "expected"),
    [
        (mpisgd.compress.DeepGradient(ratio=0.1), True),
        (mpisgd.compress.DeepGradient(ratio=0.1, momentum=0), False),
        (mpisgd.compress.PerHost(mpisgd.compress.DeepGradient(ratio=0.1)), True),
        (mpisgd.compress.Auto((mpisgd.Compression.none, mpisgd.compress.DeepGradient(ratio=0.1))), True),
        (mpisgd.compress.Auto(), False),
        (mpisgd.compress.TopK(ratio=0.1), False),
    ],
    ids=str,
)
def test_a_momentum_is_that_of_any_compressor_inside(compressor, expected):
    assert has_momentum(compressor) is expected


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServer("async", push_every=2, pull_every=4),
        ParameterServer("ssp", staleness_steps=1),
        ParameterServer("async", locked=False),
    ],
    ids=str,
)
def test_a_broadcast_of_the_state_goes_with_servers(strategy):
    """Its source did not begin anew as the others did, and they waited for it."""

    def program() -> list[float]:
        param = torch.nn.Parameter(torch.zeros(3))
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=0.5), strategy=strategy)
        for _ in range(3):
            stepped(optimizer, param)
        mpisgd.broadcast_parameters([("weight", param)], src=1)
        mpisgd.broadcast_optimizer_state(optimizer, src=1)
        for _ in range(2):
            stepped(optimizer, param)
        optimizer.synchronizer.finish()
        return param.tolist()

    told = run_ranks(3, program)
    assert [each == told[0] for each in told] == [True] * 3, told
    if strategy.pull_every == 4:  # three own steps on rank 1, then two of all ranks
        assert told[0] == pytest.approx([-0.5 - 1.0] * 3), told
