"""`verify`: modes are equal to their definition, and are not when they are broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from examples import example
from torch import nn
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import config
from mpisgd.tools.verification.cell import try_mode
from mpisgd.tools.verification.mode import Mode
from mpisgd.tools.verification.modes import all_modes
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.trial import Trial, trials_of

pytestmark = [
    pytest.mark.mpi(min_size=1),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def torch_group() -> Iterator[None]:
    starts = not dist.is_initialized()  # the tests of torch_backend keep theirs
    if starts:
        dist.init_process_group("mpisgd")
    yield
    if starts:
        dist.destroy_process_group()


SABOTAGES = [sabotage for sabotage in Sabotage if sabotage is not Sabotage.NONE]
HERE = [mode for mode in all_modes() if not mode.loses_rank]


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest, torch_group: None) -> dict[Mode, Trial]:
    """The trials of the modes that are run and make sense here."""
    run = {item.callspec.params.get("mode") for item in request.session.items if hasattr(item, "callspec")}
    chosen = [(mode, mode.dtypes[0]) for mode in HERE if mode in run]
    return {trial.mode: trial for trial in trials_of(chosen, quick=True)}


def check(mode: Mode, trials: dict[Mode, Trial], sabotages: list[Sabotage]) -> None:
    if not mode.applies(mpisgd.size(), mpisgd.num_nodes(), shared_memory=config.shared_memory()):
        return
    cells = [try_mode(trials[mode], "", sabotage) for sabotage in sabotages]
    wrong = [cell for cell in cells if not cell.is_as_wanted]
    everyone(not wrong, f"{wrong}")


def is_pair(mode: Mode) -> bool:
    """Whether it is one of all strategies with one of all compressors, or with none.

    They are tried on threads by tests/unit/fuzzing, and under MPI with --long. Other modes have each of them.
    """
    return ", compress." in mode.name or ", Compression." in mode.name


PLACES = [
    pytest.param(place, mode, marks=pytest.mark.long if is_pair(mode) else ())
    for place, mode in enumerate(HERE)
]


@pytest.mark.parametrize(("place", "mode"), PLACES, ids=lambda value: getattr(value, "name", ""))
def test_a_mode_is_equal_and_a_sabotage_is_found(place: int, mode: Mode, trials: dict[Mode, Trial]):
    check(mode, trials, [Sabotage.NONE, SABOTAGES[place % len(SABOTAGES)]])


@pytest.mark.long
@pytest.mark.parametrize("mode", HERE, ids=lambda mode: mode.name)
def test_every_sabotage_of_a_mode_is_found(mode: Mode, trials: dict[Mode, Trial]):
    check(mode, trials, SABOTAGES)


def batches(count: int) -> list[list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        [torch.randn(12, 5, generator=draw).double(), torch.randn(12, 2, generator=draw).double()]
        for _ in range(count)
    ]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2)).double()  # random on every rank


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def loss(net, batch):
    return nn.functional.mse_loss(net(batch[0]), batch[1])


@pytest.mark.parametrize(
    "strategy",
    [
        None,
        mpisgd.Sharded(2),
        mpisgd.LocalSGD(2),
        mpisgd.DiLoCo(2),
        mpisgd.DiLoCo(3, fragments=2, overlap_steps=1),
        mpisgd.ElasticAveraging(every=2),
    ],
    ids=repr,
)
def test_a_model_of_the_users_is_equal(strategy):
    found = mpisgd.verify(model, sgd, loss, batches(6), strategy=strategy)
    everyone(bool(found), str(found))
    everyone("equal: the largest difference is" in str(found))


@dataclass(frozen=True)
class AverageEvery(mpisgd.Strategy):
    """A strategy of one's own, as in docs/how-to/extending.md; from some step on it forgets a parameter."""

    steps: int
    forgets_from: int = 1000
    spoils_from: int = 1000  # the last parameter
    by: float = 0.1

    def synchronizer(self, training):
        return Averager(training, self)


class Averager(mpisgd.Synchronizer):
    def __init__(self, training, strategy):
        super().__init__(training)
        self.strategy = strategy

    def after_step(self, num_steps):
        if num_steps % self.strategy.steps == 0:
            params = [param.detach() for _, param in self.training.named]
            forgotten = 1 if num_steps >= self.strategy.forgets_from else 0
            averaged = params[: len(params) - forgotten]
            mpisgd.all_reduce_coalesced(averaged, mpisgd.ReduceOp.AVG, self.training.group)
            if num_steps >= self.strategy.spoils_from:
                params[-1].add_(self.strategy.by)


def test_the_first_step_and_the_parameter_that_differ_are_named():
    strategy = AverageEvery(1, spoils_from=3)
    found = mpisgd.verify(model, sgd, loss, batches(6), strategy=strategy, definition=mpisgd.LocalSGD(1))
    everyone(not found)
    everyone((found.step, found.parameter) == (2, "2.bias"), f"{found}")


class Irregular(nn.Module):
    """A weight of two modules, a frozen bias, and a module that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.unused = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


def grouped(params):
    """The last parameters come first, with a learning rate of their own."""
    return torch.optim.SGD(
        [{"params": params[3:][::-1], "lr": 0.02}, {"params": params[:3]}], lr=0.1, momentum=0.9
    )


def lbfgs(params):
    return torch.optim.LBFGS(params, lr=0.1, max_iter=3)


@pytest.mark.parametrize(
    ("make", "optimizer", "options"),
    [
        (model, grouped, {}),
        (Irregular, sgd, {}),
        (Irregular, grouped, {"strategy": mpisgd.LocalSGD(2)}),
        (Irregular, grouped, {"strategy": mpisgd.Sharded(2)}),
        (Irregular, sgd, {"op": mpisgd.Adasum}),
        (Irregular, grouped, {"op": mpisgd.ReduceOp.SUM}),
        (model, lbfgs, {}),
        (model, lbfgs, {"op": mpisgd.ReduceOp.SUM}),
        (Irregular, lbfgs, {"strategy": mpisgd.LocalSGD(2)}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_groups_frozen_unused_and_tied_parameters_sums_and_closures_are_equal(make, optimizer, options):
    # Gradients were given to the optimizer's parameters in the order of its groups; one that was missing, or
    # a step with a closure, was an error; sums were compared with means.
    found = mpisgd.verify(make, optimizer, loss, batches(4), **options)
    everyone(bool(found), str(found))


def diverging(params):
    return torch.optim.SGD(params, lr=1e200)


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Linear(7, 2)).double()


@pytest.mark.parametrize(
    ("make", "optimizer", "why"),
    [(model, diverging, "not finite from step"), (with_dropout, sgd, "done twice")],
)
def test_one_process_that_diverges_or_is_random_is_refused(make, optimizer, why):
    # "equal: the largest difference is inf, allowed are nan": nothing is greater than NaN. With dropout the
    # tolerance was what chance makes.
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.verify(make, optimizer, loss, batches(4))
    everyone(why in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_a_difference_that_is_not_finite_is_none_that_is_allowed():
    infinite = AverageEvery(1, spoils_from=3, by=float("inf"))
    found = mpisgd.verify(model, sgd, loss, batches(4), strategy=infinite, definition=mpisgd.LocalSGD(1))
    everyone(not found, str(found))
    everyone((found.step, found.parameter) == (2, "2.bias"), f"{found}")


def halved(net, batch):
    return loss(net, [part.bfloat16() for part in batch])


def in_bfloat16() -> nn.Module:
    return model().bfloat16()


def small_steps(params):
    return torch.optim.SGD(params, lr=0.01)


def test_bfloat16_with_small_steps_is_equal():
    found = mpisgd.verify(in_bfloat16, small_steps, halved, batches(4))
    everyone(bool(found), str(found))


@pytest.mark.mpi(min_size=2)
def test_bfloat16_without_communication_is_not_verified():
    # 16 units in the last place are more than such a step moves anything: this was "equal".
    alone = [mpisgd.new_group([rank]) for rank in range(mpisgd.size())][mpisgd.rank()]
    found = mpisgd.verify(in_bfloat16, small_steps, halved, batches(4), group=alone)
    everyone(not found, str(found))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("blind", ["same examples", "nothing moves", "no communication is due"])
def test_what_would_not_differ_without_communication_is_not_verified(blind):
    optimizer, options, given = sgd, {}, batches(4)
    if blind == "same examples":
        count = 12 // mpisgd.size()
        given = [[torch.cat([part[:count]] * mpisgd.size()) for part in batch] for batch in given]
    elif blind == "nothing moves":
        optimizer = lambda params: torch.optim.SGD(params, lr=0.0)  # noqa: E731
    else:
        options = {"strategy": mpisgd.LocalSGD(10)}
    found = mpisgd.verify(model, optimizer, loss, given, **options)
    everyone(not found, str(found))
    everyone("cannot tell" in str(found), str(found))


def test_a_strategy_of_ones_own_is_compared_with_the_definition_that_is_named():
    found = mpisgd.verify(
        model, sgd, loss, batches(6), strategy=AverageEvery(2), definition=mpisgd.LocalSGD(2)
    )
    everyone(bool(found), str(found))


@pytest.mark.mpi(min_size=2)
def test_a_bug_in_a_strategy_of_ones_own_is_located():
    found = mpisgd.verify(
        model, sgd, loss, batches(6), strategy=AverageEvery(2, forgets_from=4), definition=mpisgd.LocalSGD(2)
    )
    everyone(not found)
    everyone((found.step, found.parameter) == (3, "2.bias"), f"{found}")


@pytest.mark.parametrize(
    ("wrong", "options"),
    [
        ([], {}),
        ([[torch.zeros(12, 5), torch.zeros(11, 2)]], {}),
        (batches(1), {"strategy": mpisgd.Gossip("ring")}),
        (batches(1), {"strategy": AverageEvery(2)}),
        (batches(1), {"definition": mpisgd.Gossip("ring")}),
        (batches(1), {"compression": mpisgd.Compression.bf16}),
        (batches(1), {"strategy": mpisgd.LocalSGD(2), "op": mpisgd.ReduceOp.SUM}),
    ],
    ids=["no batch", "unequal", "strategy", "own strategy", "definition", "compression", "sum"],
)
def test_what_cannot_be_compared_is_refused(wrong, options):
    with raises_everywhere(mpisgd.InvalidArgument):
        mpisgd.verify(model, sgd, loss, wrong, **options)


def test_a_strategy_of_ones_own_is_equal_to_the_paper_that_it_has():
    page = example("state")
    strategy = page["BlockMomentum"](steps=2)
    found = mpisgd.verify(model, sgd, loss, batches(6), strategy=strategy)
    everyone(bool(found), f"{found}")
    other = page["BlockPaper"](2, 0.4)
    object.__setattr__(strategy, "paper", lambda size, lengths=(): other)
    found = mpisgd.verify(model, sgd, loss, batches(6), strategy=strategy)
    everyone(not found and found.step == 3, f"{found}")
