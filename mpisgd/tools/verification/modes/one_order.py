"""`reproducible="ranks"`: the bits of one process that adds the gradients of micro-batches along a tree."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpisgd.tools.verification.mode import Mode, Reference, flaw_of
from mpisgd.tools.verification.modes.synchronous import adam, distributed, sgd
from mpisgd.tools.verification.problem import Problem, flat_parameters, wide_problem
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import MakeOptimizer

__all__ = ["ONE_ORDER"]

FAMILY = "one order of sums"
EACH = 2  # micro-batches of a rank, in each step


def _by_ranks(make_optimizer: MakeOptimizer, bucket_cap_bytes: int) -> Callable[[Trainer], Tensor]:
    """Return the training, in which each rank has the micro-batches that follow those of the one before."""

    def train(trainer: Trainer) -> Tensor:
        model, optimizer = distributed(
            trainer,
            make_optimizer,
            bucket_cap_bytes=bucket_cap_bytes,
            backward_passes_per_step=EACH,
            reproducible="ranks",
        )
        rows = []
        for step in range(trainer.problem.steps):
            optimizer.zero_grad()
            for batch in zip(*(part.chunk(EACH) for part in trainer.batch(step)), strict=True):
                torch.autograd.backward(trainer.loss(model, batch))
            optimizer.step()
            trainer.end_step(list(model.parameters()))
            rows.append(flat_parameters(model))
        return torch.stack(rows)

    return train


def _along_tree(make_optimizer: MakeOptimizer) -> Callable[[Problem], Reference]:
    """Return a function that trains one process on all micro-batches; no other bit is allowed."""

    def reference(problem: Problem) -> Reference:
        model = problem.model()
        params, rows = list(model.parameters()), []
        optimizer = make_optimizer(params)
        for joined in problem.batches:
            chunks = [part.chunk(EACH * problem.size) for part in joined]
            losses = [problem.loss(model, batch) for batch in zip(*chunks, strict=True)]
            grads = [torch.autograd.grad(loss, params) for loss in losses]
            for param, leaves in zip(params, zip(*grads, strict=True), strict=True):
                param.grad = _sum(leaves) / len(leaves)
            optimizer.step()
            rows.append(flat_parameters(model))
        expected = torch.stack(rows)
        return Reference(expected, 0.0, "the order of additions is the same", flaw_of(expected))

    return reference


def _sum(leaves: Sequence[Tensor]) -> Tensor:
    """Return the sum of both halves, each added up likewise; there is a power of two of them."""
    half = len(leaves) // 2
    return _sum(leaves[:half]) + _sum(leaves[half:]) if half else leaves[0]


ONE_ORDER = (
    Mode('reproducible="ranks", AdamW', FAMILY, _by_ranks(adam, 2**20), _along_tree(adam), power_of_two=True),
    Mode(
        '70,000 parameters, reproducible="ranks"',
        FAMILY,
        _by_ranks(sgd, 2**14),
        _along_tree(sgd),
        problem=wide_problem,
        power_of_two=True,
        quick=False,
    ),
)
