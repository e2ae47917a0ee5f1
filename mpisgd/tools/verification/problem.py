"""`Problem`: a model and joined batches, on which a mode of training is tried; the same on all ranks."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

__all__ = [
    "KNOWN",
    "Batch",
    "Loss",
    "Problem",
    "drawn",
    "embedding_problem",
    "flat_parameters",
    "linear_problem",
    "long_problem",
    "normalized_problem",
    "standard_problem",
    "turned",
    "wide_problem",
]

FEATURES, HIDDEN, OUTPUTS = 6, 12, 4
# Its two matrices are longer than what every rank of a host adds up for itself, and come to a few chunks, the
# last of which is short, on a host and between hosts; its biases are shorter.
LONG = 22_001
WIDE = 256  # for messages so long that transports take other ways
JOINED = 24  # examples of a step over all ranks: an even number for each
SEED = 20_000
ROWS = 3  # of a table, for each rank
KNOWN = 4  # most modes of a job train the same problem

M = TypeVar("M", bound=nn.Module)
Batch = Sequence[Tensor]  # inputs and targets, say: of equal length
Loss = Callable[[Any, Batch], Tensor]  # of what is called with inputs, and a batch: the mean over examples


class Problem(NamedTuple):
    """What is trained, in as many steps as there are batches.

    Attributes:
        model: makes the model as it is before the first step; equal ones on all ranks.
        loss: the mean loss of a model on a batch.
        batches: of all ranks together, by step; each divides evenly among the ranks.
        size: how many ranks.
    """

    model: Callable[[], nn.Module]
    loss: Loss
    batches: Sequence[Batch]
    size: int

    @property
    def steps(self) -> int:
        """How many steps are trained."""
        return len(self.batches)

    @property
    def dtype(self) -> torch.dtype:
        """Of the first parameter."""
        return next(iter(self.model().parameters())).dtype

    def share(self, step: int, rank: int, size: int | None = None, *, other: bool = False) -> Batch:
        """Return a rank's equal part of a step's batch.

        Args:
            step: which one.
            rank: whose.
            size: of how many, `self.size` by default.
            other: wrong examples instead: targets that do not belong to the inputs.
        """
        batch = list(self.batches[step])
        if other:
            batch[-1] = batch[-1].roll(1, 0)
        count = len(batch[0]) // (size or self.size)
        return [part[rank * count : (rank + 1) * count] for part in batch]


def turned(problem: Problem) -> Problem:
    """Return the problem with the examples of each rank from the last to the first."""
    batches = []
    for batch in problem.batches:
        count = len(batch[0]) // problem.size
        batches.append([torch.cat([share.flip(0) for share in torch.split(part, count)]) for part in batch])
    return problem._replace(batches=batches)


@lru_cache(maxsize=KNOWN)
def standard_problem(size: int, steps: int, dtype: torch.dtype) -> Problem:
    """Return a small regression whose batches divide evenly among `size` ranks, and one rank fewer."""
    joined = math.lcm(JOINED, 2 * size, max(1, size - 1))
    batches = [_batch(joined, step, dtype) for step in range(steps)]
    return Problem(lambda: _model(dtype), _mean_square, batches, size)


@lru_cache(maxsize=KNOWN)
def wide_problem(size: int, steps: int, dtype: torch.dtype) -> Problem:
    """Return the same with some 70,000 parameters."""
    return standard_problem(size, steps, dtype)._replace(model=lambda: _model(dtype, WIDE))


@lru_cache(maxsize=KNOWN)
def long_problem(size: int, steps: int, dtype: torch.dtype) -> Problem:
    """Return a regression with 240,000 parameters in tensors of several lengths, and two examples a rank."""
    problem = standard_problem(size, steps, dtype)

    def model() -> nn.Module:
        plain = nn.Sequential(nn.Linear(FEATURES, LONG), nn.Tanh(), nn.Linear(LONG, OUTPUTS))
        return drawn(plain, dtype)

    def loss(forward: Any, batch: Batch) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(forward(inputs) / math.sqrt(LONG), targets)

    batches = [[part[: 2 * size] for part in batch] for batch in problem.batches]
    return problem._replace(model=model, loss=loss, batches=batches)


@lru_cache(maxsize=KNOWN)
def normalized_problem(size: int, steps: int, dtype: torch.dtype) -> Problem:
    """Return the same with batch normalization, whose statistics are those of the joined batch."""
    problem = standard_problem(size, steps, dtype)

    def model() -> nn.Module:
        plain = _model(dtype)
        return nn.Sequential(plain[0], nn.BatchNorm1d(HIDDEN, dtype=dtype), plain[1:])

    return problem._replace(model=model)


def linear_problem(size: int, steps: int, dtype: torch.dtype) -> Problem:
    """Return a loss that is linear in the parameters: its gradients do not depend on them."""

    def model() -> nn.Module:
        return drawn(nn.Linear(FEATURES, OUTPUTS), dtype)

    def loss(forward: Any, batch: Batch) -> Tensor:
        inputs, targets = batch
        products: Tensor = forward(inputs) * targets
        return products.mean()

    return standard_problem(size, steps, dtype)._replace(model=model, loss=loss)


def embedding_problem(size: int, steps: int, dtype: torch.dtype) -> Problem:
    """Return a linear loss of a table of which each rank's examples look up rows of their own.

    Its gradients are sparse: no two ranks ever update the same elements.
    """

    def model() -> nn.Module:
        return drawn(nn.Embedding(ROWS * size, OUTPUTS, sparse=True), dtype)

    problem = linear_problem(size, steps, dtype)
    share = len(problem.batches[0][0]) // size
    rows = torch.cat([torch.arange(share) % ROWS + rank * ROWS for rank in range(size)])
    return problem._replace(model=model, batches=[[rows, targets] for _, targets in problem.batches])


def _batch(joined: int, step: int, dtype: torch.dtype) -> Batch:
    draw = torch.Generator().manual_seed(step)
    drawn = torch.randn(joined, FEATURES + OUTPUTS, generator=draw, dtype=torch.float64).to(dtype)
    return drawn[:, :FEATURES].contiguous(), drawn[:, FEATURES:].contiguous()


def _model(dtype: torch.dtype, hidden: int = HIDDEN) -> nn.Sequential:
    layers = (nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
    return drawn(nn.Sequential(*layers, nn.Linear(hidden, OUTPUTS)), dtype)


def drawn(model: M, dtype: torch.dtype) -> M:
    """Return a model with parameters drawn from a generator of its own."""
    model = model.to(dtype)
    draw = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=draw, dtype=torch.float64) / 3)
    return model


def _mean_square(forward: Any, batch: Batch) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(forward(inputs), targets)


def flat_parameters(model: nn.Module) -> Tensor:
    """Return all parameters side by side, [numel], in memory of their own."""
    return torch.cat([param.detach().flatten() for param in model.parameters()])
