"""Synchronous SGD by the native optimizer: equal to one process on the joined batch."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.tools.verification.mode import JOINED, Mode, Reference, between_orders
from mpisgd.tools.verification.problem import (
    KNOWN,
    Problem,
    flat_parameters,
    long_problem,
    wide_problem,
)
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import MakeOptimizer, joined_batch

__all__ = [
    "SYNCHRONOUS",
    "adam",
    "apart_from_the_first",
    "distributed",
    "equal_to_one_process",
    "native",
    "sgd",
]

MAX_NORM = 0.05  # less than the norm of most gradients
FAMILY = "synchronous"


def sgd(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW, with an epsilon that keeps it from dividing by next to nothing."""
    return torch.optim.AdamW(params, lr=0.01, eps=1e-4)


@cache
def equal_to_one_process(
    make_optimizer: MakeOptimizer, max_norm: float = 0.0
) -> Callable[[Problem], Reference]:
    """Return the reference of synchronous training; for the same problem it is computed once."""

    def simulate(problem: Problem, order: int) -> Tensor:
        return joined_batch(problem, make_optimizer, max_norm)

    compute, known = between_orders(simulate, JOINED), deque[tuple[Problem, Reference]](maxlen=KNOWN)

    def reference(problem: Problem) -> Reference:
        for other, found in known:
            if other is problem:
                return found
        known.append((problem, compute(problem)))
        return known[-1][1]

    return reference


def native(make_optimizer: MakeOptimizer, parts: int = 1, **options: Any) -> Callable[[Trainer], Tensor]:
    """Return the training by `DistributedOptimizer` with these options."""

    def train(trainer: Trainer) -> Tensor:
        model, optimizer = distributed(trainer, make_optimizer, **options)
        return torch.stack(trainer.train(model, optimizer, parts=parts))

    return train


def distributed(
    trainer: Trainer, make_optimizer: MakeOptimizer, **options: Any
) -> tuple[nn.Module, mpisgd.DistributedOptimizer]:
    """Return a new model and its optimizer."""
    model, group = trainer.problem.model(), trainer.group()
    made = make_optimizer(list(model.parameters()))
    return model, mpisgd.DistributedOptimizer(made, model.named_parameters(), group=group, **options)


@torch.no_grad()
def apart_from_the_first(model: nn.Module) -> None:
    """Give each rank but the first other parameters."""
    for param in model.parameters():
        param.add_(mpisgd.rank())


def started_apart(trainer: Trainer) -> Tensor:
    """Train from the parameters of rank 0; return with each step's whether the first one was refused before.

    It is refused on every rank while these have different parameters.
    """
    model, optimizer = distributed(trainer, sgd)
    apart_from_the_first(model)
    refused = False
    if trainer.sabotage is not Sabotage.NO_COMMUNICATION:
        torch.autograd.backward(trainer.loss(model, trainer.batch(0)))
        try:
            optimizer.step()
        except mpisgd.CollectiveMismatch:
            refused = True
        mpisgd.broadcast_parameters(model)
    rows = torch.stack(trainer.train(model, optimizer))
    return torch.cat([rows, rows.new_full((len(rows), 1), float(refused))], dim=1)


def refused_at_first(problem: Problem) -> Reference:
    """Return the reference of `started_apart`: one process, and a 1 in each row for the refusal."""
    reference = equal_to_one_process(sgd)(problem)
    rows = reference.expected
    return reference._replace(expected=torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1))


def clipped(**options: Any) -> Callable[[Trainer], Tensor]:
    """Return the training with clipped gradients."""

    def train(trainer: Trainer) -> Tensor:
        model, optimizer = distributed(trainer, sgd, **options)
        return torch.stack(
            trainer.train(model, optimizer, before_step=lambda: optimizer.clip_grad_norm_(MAX_NORM))
        )

    return train


def sums(trainer: Trainer) -> Tensor:
    """Train with the sum of the gradients of losses that are divided by the number of ranks."""
    model, optimizer = distributed(trainer, sgd, op=mpisgd.ReduceOp.SUM)
    size = trainer.problem.size
    return torch.stack(
        trainer.train(model, optimizer, backward=lambda loss: torch.autograd.backward(loss / size))
    )


def scaled(trainer: Trainer) -> Tensor:
    """Train with a GradScaler, whose scales are powers of two."""
    model, optimizer = distributed(trainer, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    rows = []
    for step in range(trainer.problem.steps):
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(trainer.loss(model, trainer.batch(step))))
        scaler.step(optimizer)
        scaler.update()
        trainer.end_step(list(model.parameters()))
        rows.append(flat_parameters(model))
    return torch.stack(rows)


def _mode(name: str, train: Callable[[Trainer], Tensor], make: MakeOptimizer = sgd, **options: Any) -> Mode:
    max_norm = options.pop("max_norm", 0.0)
    return Mode(name, FAMILY, train, equal_to_one_process(make, max_norm), **options)


SYNCHRONOUS = (
    _mode("Synchronous", native(sgd)),
    _mode("AdamW", native(adam), adam),
    _mode("overlap, small buckets", native(sgd, overlap=True, bucket_cap_bytes=256)),
    _mode("two backward passes per step", native(sgd, parts=2, backward_passes_per_step=2)),
    _mode("clip_grad_norm_", clipped(), max_norm=MAX_NORM),
    _mode("clip_grad_norm_, shared parameters", clipped(share_parameters=True), max_norm=MAX_NORM),
    _mode("clip_grad_norm_, Sharded(2)", clipped(strategy=mpisgd.Sharded(2)), max_norm=MAX_NORM, quick=False),
    _mode("op=SUM", sums),
    _mode("GradScaler", scaled),
    Mode("started with different parameters", FAMILY, started_apart, refused_at_first, (2, 2**31)),
    _mode("shared parameters", native(sgd, share_parameters=True)),
    _mode("shared parameters, AdamW", native(adam, share_parameters=True), adam, quick=False),
    _mode('ParameterServer("sync")', native(sgd, strategy=mpisgd.ParameterServer("sync")), quick=False),
    _mode("Sharded(stage=1)", native(sgd, strategy=mpisgd.Sharded(1))),
    _mode("Sharded(stage=2), AdamW", native(adam, strategy=mpisgd.Sharded(2)), adam),
    _mode("70,000 parameters", native(sgd), problem=wide_problem, quick=False),
    _mode("long messages", native(sgd), problem=long_problem),
    _mode(
        "long messages, shared parameters",
        native(sgd, share_parameters=True),
        problem=long_problem,
        quick=False,
    ),
    _mode(
        "long messages, Sharded(stage=2)",
        native(sgd, strategy=mpisgd.Sharded(2)),
        problem=long_problem,
        quick=False,
    ),
    _mode("70,000 shared parameters", native(sgd, share_parameters=True), problem=wide_problem, quick=False),
    _mode(
        "70,000 parameters, Sharded(stage=2)",
        native(sgd, strategy=mpisgd.Sharded(2)),
        problem=wide_problem,
        quick=False,
    ),
)
