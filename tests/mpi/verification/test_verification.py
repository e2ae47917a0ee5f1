"""`verify`: modes are equal to their definition, and are not when they are broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd.verification.cell import try_mode
from mpisgd.verification.mode import Mode
from mpisgd.verification.modes import MODES
from mpisgd.verification.sabotage import Sabotage

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
HERE = [mode for mode in MODES if not mode.loses_rank]


def check(mode: Mode, sabotages: list[Sabotage]) -> None:
    cells = [try_mode(mode, mode.dtypes[0], "", quick=True, sabotage=sabotage) for sabotage in sabotages]
    wrong = [cell for cell in cells if cell is not None and not cell.is_as_wanted]
    everyone(not wrong, f"{wrong}")


@pytest.mark.parametrize(
    ("place", "mode"), list(enumerate(HERE)), ids=lambda value: getattr(value, "name", "")
)
def test_a_mode_is_equal_and_a_sabotage_is_found(place: int, mode: Mode):
    check(mode, [Sabotage.NONE, SABOTAGES[place % len(SABOTAGES)]])


@pytest.mark.long
@pytest.mark.parametrize("mode", HERE, ids=lambda mode: mode.name)
def test_every_sabotage_of_a_mode_is_found(mode: Mode):
    check(mode, SABOTAGES)


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


def test_the_first_step_and_the_parameter_that_differ_are_named():
    step = 0

    def drifting(net, batch):
        """From the third step of a training on, ranks have other losses than one process."""
        nonlocal step
        step += torch.is_grad_enabled()
        extra = net[2].bias.sum() if len(batch[0]) == 12 // mpisgd.size() and net[2].bias[0] < 0.6 else 0
        return loss(net, batch) + (0.3 * extra if is_ours() and step > 2 else 0)

    def is_ours() -> bool:
        return made[0] > 3  # verify makes one for names, two for the reference, then the one it trains

    made = [0]

    def counted() -> nn.Module:
        nonlocal step
        made[0] += 1
        step = 0
        return model()

    found = mpisgd.verify(counted, sgd, drifting, batches(6))
    everyone(not found)
    everyone(found.step == 2, f"{found}")
    everyone(found.parameter == "2.bias", f"{found}")


@dataclass(frozen=True)
class AverageEvery(mpisgd.Strategy):
    """A strategy of one's own, as in docs/how-to/extending.md; from some step on it forgets a parameter."""

    steps: int
    forgets_from: int = 1000

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
    ],
    ids=["no batch", "unequal", "strategy", "own strategy", "definition", "compression"],
)
def test_what_cannot_be_compared_is_refused(wrong, options):
    with raises_everywhere(mpisgd.InvalidArgument):
        mpisgd.verify(model, sgd, loss, wrong, **options)
