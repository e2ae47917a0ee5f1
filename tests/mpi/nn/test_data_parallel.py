"""One rank has the batch: outputs and gradients equal one process on the whole of it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import config
from mpisgd.job.lifecycle import world
from mpisgd.nn import DataParallel, DataParallelCriterion

LIMIT = 1e-12
FEATURES, CLASSES = 5, 3
ROWS = [12, 7, 2, 1]  # even, uneven, and fewer than three ranks


class Net(nn.Module):
    """Has a frozen, an unused and a tied parameter, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
            self.unused = nn.Linear(2, 2)
            self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
            self.register_buffer("shift", torch.randn(4))
        self.tied = self.first.weight
        self.double()

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return self.last(torch.tanh(self.first(x) + self.frozen + self.shift + self.tied.sum())) * scale


def net() -> Net:
    """Values differ by rank: what counts are those of the rank with the batch."""
    return Net(mpisgd.rank())


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * rows + seed)
    inputs = torch.randn(rows, FEATURES, generator=draw, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (rows,), generator=draw)


def grads(module: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in module.parameters()]


def close(ours: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    pairs = zip(ours, expected, strict=True)
    return all(
        a is b if a is None or b is None else a.shape == b.shape and (a - b).abs().max().item() <= LIMIT
        for a, b in pairs
    )


@pytest.mark.parametrize("rows", ROWS)
def test_outputs_and_gradients_equal_one_process_and_are_on_one_rank(rows):
    root = mpisgd.size() - 1
    module, is_root = net(), mpisgd.rank() == mpisgd.size() - 1
    plain = copy.deepcopy(module)
    inputs, targets = batch(rows)
    model = DataParallel(module, src=root)
    mine, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    outputs = model(mine if is_root else None)
    loss = nn.functional.cross_entropy(outputs, targets) if is_root else outputs
    loss.backward()
    expected = plain(theirs)
    nn.functional.cross_entropy(expected, targets).backward()
    if not is_root:
        everyone(
            loss.dim() == 0 and all(grad is None for grad in grads(module)), "the root alone has gradients"
        )
        return
    everyone(
        close([outputs, mine.grad, *grads(module)], [expected, theirs.grad, *grads(plain)]),
        f"{grads(module)}, {grads(plain)}",
    )


def test_parameters_of_the_root_are_those_of_every_call():
    """Three steps of an optimizer that the root alone has."""
    module = net()
    plain = copy.deepcopy(module)
    model = DataParallel(module)
    trained = [param for param in module.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1) if mpisgd.rank() == 0 else None
    expected = torch.optim.SGD([param for param in plain.parameters() if param.requires_grad], lr=0.1)
    for step in range(3):
        inputs, targets = batch(9, seed=step)
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets) if mpisgd.rank() == 0 else outputs
        if optimizer is not None:
            optimizer.zero_grad()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        expected.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        expected.step()
    if mpisgd.rank() == 0:
        apart = [
            (a - b).abs().max().item() for a, b in zip(module.parameters(), plain.parameters(), strict=True)
        ]
        everyone(max(apart) <= LIMIT, f"{apart}")
    else:
        everyone(True)


class Nested(nn.Module):
    """Takes and returns structures; one output has no dimensions, one no gradient, one is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 2).double()

    def forward(self, pair: tuple[Tensor, Tensor], *, more: dict[str, Any]) -> dict[str, Any]:
        first, second = pair
        out = self.linear(first) * more["scale"] + second
        return {"rows": (out, out.argmax(1)), "mean": out.mean(), "nothing": None, "power": more["power"]}


@pytest.mark.parametrize("normalizes", [False, True])
def test_two_forwards_before_a_backward(normalizes):
    # The second one copied the parameters over those that the first had saved for its backward, which raised.
    net_ = Net(mpisgd.rank())
    if normalizes:
        net_.last = nn.Sequential(nn.BatchNorm1d(4), net_.last).double()
    model = DataParallel(net_)

    def loss(seed: int) -> Tensor:
        outputs = model(batch(12, seed)[0] if mpisgd.rank() == 0 else None)
        return outputs.square().sum() if mpisgd.rank() == 0 else outputs

    losses = [loss(0), loss(1)]
    for each in losses:
        each.backward()
    together = [None if grad is None else grad.clone() for grad in grads(net_)]
    net_.zero_grad()
    for seed in range(2):
        loss(seed).backward()
    everyone(mpisgd.rank() > 0 or close(together, grads(net_)), "other gradients")


def test_structures_keywords_scalars_and_what_is_no_tensor():
    module = Nested()
    model = DataParallel(module)
    first, second = batch(6)[0], batch(6, seed=1)[0][:, :2]
    scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    arguments = {"pair": (first, second), "more": {"scale": scale, "power": 2}}
    outputs = model(**arguments) if mpisgd.rank() == 0 else model()
    loss = outputs["rows"][0].square().sum() + outputs["mean"].sum() if mpisgd.rank() == 0 else outputs
    loss.backward()
    if mpisgd.rank() > 0:
        everyone(True)
        everyone(True)
        return
    found = [*grads(module), scale.grad, outputs["rows"][0]]
    module.zero_grad()
    scale.grad = None
    parts = [min(r, 6 % mpisgd.size()) + r * (6 // mpisgd.size()) for r in range(mpisgd.size() + 1)]
    expected = module(**arguments)["rows"][0]
    means = torch.stack([expected[a:b].mean() for a, b in itertools.pairwise(parts)])
    (expected.square().sum() + means.sum()).backward()
    everyone(close(found, [*grads(module), scale.grad, expected]))
    everyone(
        torch.equal(outputs["rows"][1], expected.argmax(1))
        and outputs["mean"].shape == (mpisgd.size(),)
        and (outputs["nothing"], outputs["power"]) == (None, 2)
    )


def test_rows_along_another_dimension():
    module = nn.GRU(FEATURES, 2).double()  # [length, batch, features]
    model = DataParallel(module, dim=1)
    inputs = torch.randn(3, 7, FEATURES, dtype=torch.float64)
    outputs = model(inputs)
    if mpisgd.rank() > 0:
        everyone(True)
        return
    expected = module(inputs)
    everyone(close(list(outputs), list(expected)))


def test_without_gradients_nothing_is_kept():
    model = DataParallel(net())
    inputs, _ = batch(5)
    if mpisgd.rank() == 0:  # what holds on the root counts
        with torch.no_grad():
            outputs = model(inputs)
    else:
        outputs = model(inputs)
    everyone(not outputs.requires_grad)


@pytest.mark.mpi(min_size=2)
def test_batch_norm_keeps_the_statistics_of_the_root():
    module = nn.BatchNorm1d(FEATURES).double()
    plain = copy.deepcopy(module)
    model = DataParallel(module)
    inputs = batch(2 * mpisgd.size())[0]
    model(inputs)
    plain(inputs[:2])
    if mpisgd.rank() == 0:
        everyone(close(list(module.buffers())[:2], list(plain.buffers())[:2]))
    else:
        everyone(True)
    model(inputs)
    same_on_all_ranks(int(module.num_batches_tracked))


# -- the parallel loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_parallel_loss_equals_the_criterion_on_the_whole_batch(rows, reduction):
    module = net()
    plain = copy.deepcopy(module)
    inputs, targets = batch(rows)
    model = DataParallel(module, gather_outputs=False)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss(reduction=reduction))
    loss = criterion(model(inputs), targets)
    (3 * loss).backward()
    expected = nn.functional.cross_entropy(plain(inputs), targets, reduction=reduction)
    (3 * expected).backward()
    same_on_all_ranks(loss.item())
    if mpisgd.rank() == 0:
        everyone(close([loss, *grads(module)], [expected, *grads(plain)]), f"{loss}, {expected}")
    else:
        everyone(all(grad is None for grad in grads(module)))


def test_targets_that_are_left_out_count_by_a_weight():
    module = net()
    plain = copy.deepcopy(module)
    inputs, targets = batch(8)
    targets[:3] = -100
    model = DataParallel(module, gather_outputs=False)
    criterion = DataParallelCriterion(
        nn.CrossEntropyLoss(), weight=lambda outputs, targets: (targets != -100).sum()
    )
    loss = criterion(model(inputs), targets)
    loss.backward()
    expected = nn.functional.cross_entropy(plain(inputs), targets)
    expected.backward()
    if mpisgd.rank() == 0:
        everyone(close([loss, *grads(module)], [expected, *grads(plain)]), f"{loss}, {expected}")
    else:
        everyone(True)


# -- mistakes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.zeros(4, 2), torch.zeros(3, 2)), "different numbers of rows"),
        ((1.0, None), "no tensor with rows"),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused_everywhere(arguments, said):
    model = DataParallel(nn.Identity())
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        model(*arguments) if mpisgd.rank() == 0 else model()
    everyone(said in caught.text, caught.text)


class FailsOn(nn.Module):
    """Raises where a row has a certain number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        if (x == self.number).any():
            raise ZeroDivisionError(f"row {self.number}")
        return x


@pytest.mark.parametrize("gather_outputs", [True, False])
def test_what_a_module_raises_on_one_rank_is_raised_on_all(gather_outputs):
    rows = torch.arange(8.0).view(8, 1)
    if gather_outputs:
        with raises_everywhere(ZeroDivisionError) as caught:
            DataParallel(FailsOn(7))(rows)
    else:
        outputs = DataParallel(nn.Identity(), gather_outputs=False)(rows)
        with raises_everywhere(ZeroDivisionError) as caught:
            DataParallelCriterion(lambda out, _: FailsOn(7)(out).sum())(outputs, rows)
    everyone("row 7" in caught.text, caught.text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataParallel(lambda x: x),
        lambda: DataParallel(nn.Identity(), src=99),
        lambda: DataParallel(nn.Identity(), dim=None),
        lambda: DataParallel(nn.Identity(), gather_outputs="no"),
        lambda: DataParallelCriterion(nn.CrossEntropyLoss(reduction="none")),
        lambda: DataParallelCriterion(7),
        lambda: DataParallelCriterion(nn.CrossEntropyLoss(), weight=3),
    ],
)
def test_arguments_are_checked_at_construction(make: Callable[[], Any]):
    with raises_everywhere(mpisgd.MpisgdError):
        make()


# -- bytes ----------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """What a rank has handed to mpi4py."""

    copied: int
    reduced: int
    rows: int


@pytest.fixture
def group(monkeypatch):
    """All ranks, without shared memory."""
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    return mpisgd.new_group()


@pytest.mark.mpi(min_size=2)
def test_a_step_copies_the_parameters_once_reduces_the_gradients_once_and_moves_rows(group):
    module = nn.Linear(FEATURES, CLASSES).double()
    model = DataParallel(module, group=group)
    communicator = group.queue.communicator
    sent, given = communicator.sent_bytes, dict(communicator.given_bytes)
    inputs = batch(2 * group.size)[0]
    outputs = model(inputs)
    (outputs.square().sum() if group.rank == 0 else outputs).backward()
    found = Sent(
        communicator.given_bytes["Bcast"] - given.get("Bcast", 0),
        communicator.given_bytes["Reduce"] - given.get("Reduce", 0),
        communicator.sent_bytes - sent,
    )
    params = (FEATURES + 1) * CLASSES * 8
    others = 2 * (group.size - 1)  # rows of the other ranks
    rows = others * (FEATURES + CLASSES) * 8 if group.rank == 0 else 2 * CLASSES * 8
    everyone(found == Sent(params, params, rows), f"{found}, {Sent(params, params, rows)}")
    everyone(world().size == group.size)
