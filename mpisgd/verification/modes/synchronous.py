"""Synchronous SGD by the native optimizer and by Horovod's: equal to one process on the joined batch."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.verification.mode import Mode, Reference, between_orders
from mpisgd.verification.problem import Problem, flat_parameters
from mpisgd.verification.sabotage import Sabotage
from mpisgd.verification.serial import MakeOptimizer, joined_batch
from mpisgd.verification.trainee import Trainee

__all__ = ["SYNCHRONOUS", "adam", "equal_to_one_process", "sgd"]

MAX_NORM = 0.05  # less than the norm of most gradients
FAMILY = "synchronous"


def sgd(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW, with an epsilon that keeps it from dividing by next to nothing."""
    return torch.optim.AdamW(params, lr=0.01, eps=1e-4)


def equal_to_one_process(
    make_optimizer: MakeOptimizer, max_norm: float = 0.0
) -> Callable[[Problem], Reference]:
    """Return what synchronous training must be equal to."""

    def simulate(problem: Problem, order: int) -> Tensor:
        turned = [[part.flip(0) for part in batch] for batch in problem.batches]
        chosen = problem if order > 0 else problem._replace(batches=turned)
        return joined_batch(chosen, make_optimizer, max_norm)

    return between_orders(simulate, "examples added up from the last to the first")


def native(make_optimizer: MakeOptimizer, parts: int = 1, **options: Any) -> Callable[[Trainee], Tensor]:
    """Return the training by `DistributedOptimizer` with these options."""

    def train(trainee: Trainee) -> Tensor:
        model, optimizer = _distributed(trainee, make_optimizer, **options)
        return torch.stack(trainee.train(model, optimizer, parts=parts))

    return train


def _distributed(
    trainee: Trainee, make_optimizer: MakeOptimizer, **options: Any
) -> tuple[nn.Module, mpisgd.DistributedOptimizer]:
    model, group = trainee.problem.model(), trainee.group()
    made = make_optimizer(list(model.parameters()))
    return model, mpisgd.DistributedOptimizer(made, model.named_parameters(), group=group, **options)


def clipped(**options: Any) -> Callable[[Trainee], Tensor]:
    """Return the training with clipped gradients."""

    def train(trainee: Trainee) -> Tensor:
        model, optimizer = _distributed(trainee, sgd, **options)
        return torch.stack(
            trainee.train(model, optimizer, before_step=lambda: optimizer.clip_grad_norm_(MAX_NORM))
        )

    return train


def sums(trainee: Trainee) -> Tensor:
    """Train with the sum of the gradients of losses that are divided by the number of ranks."""
    model, optimizer = _distributed(trainee, sgd, op=mpisgd.ReduceOp.SUM)
    size = trainee.problem.size
    return torch.stack(
        trainee.train(model, optimizer, backward=lambda loss: torch.autograd.backward(loss / size))
    )


def scaled(trainee: Trainee) -> Tensor:
    """Train with a GradScaler, whose scales are powers of two."""
    model, optimizer = _distributed(trainee, sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    rows = []
    for step in range(trainee.problem.steps):
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale(trainee.loss(model, trainee.batch(step))))
        scaler.step(optimizer)
        scaler.update()
        trainee.end_step(step, list(model.parameters()))
        rows.append(flat_parameters(model))
    return torch.stack(rows)


def _first_steps(trainee: Trainee, num_steps: int) -> Trainee:
    """Return the same training up to a step."""
    problem = trainee.problem
    return Trainee(problem._replace(batches=problem.batches[:num_steps]), trainee.sabotage)


def resumed(trainee: Trainee) -> Tensor:
    """Train the first half, save, and train the rest with a new model and optimizer from what was saved."""
    problem = trainee.problem
    half = max(1, problem.steps // 2)
    model, optimizer = _distributed(trainee, adam)
    rows = _first_steps(trainee, half).train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = _distributed(trainee, adam)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return torch.stack([*rows, *trainee.train(model, optimizer, first=half)])


def fewer_ranks(trainee: Trainee) -> Tensor:
    """Train the second half without the last rank, as after its loss; it watches."""
    problem = trainee.problem
    half = max(1, problem.steps // 2)
    others = trainee.smaller_group()
    model, optimizer = _distributed(trainee, sgd)
    rows = _first_steps(trainee, half).train(model, optimizer)
    if others is not None:
        optimizer.rebuild(others)
    for step in range(half, problem.steps):
        optimizer.zero_grad()
        if others is not None:
            batch = trainee.batch(step, trainee.rank, problem.size - 1)
            torch.autograd.backward(trainee.loss(model, batch))
            optimizer.step()
        mpisgd.broadcast_parameters(model)
        rows.append(flat_parameters(model))
    return torch.stack(rows)


def horovod(trainee: Trainee) -> Tensor:
    """Train with Horovod's optimizer."""
    import mpisgd.horovod as hvd

    hvd.init()
    model = trainee.problem.model()
    alone = trainee.sabotage is Sabotage.NO_COMMUNICATION
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())] if alone else []
    optimizer = hvd.DistributedOptimizer(
        sgd(list(model.parameters())),
        named_parameters=model.named_parameters(),
        process_set=sets[trainee.rank] if sets else hvd.global_process_set,
    )
    rows = trainee.train(model, optimizer)
    for process_set in sets:
        hvd.remove_process_set(process_set)
    return torch.stack(rows)


def _mode(name: str, train: Callable[[Trainee], Tensor], make: MakeOptimizer = sgd, **options: Any) -> Mode:
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
    _mode("shared parameters", native(sgd, share_parameters=True)),
    _mode("shared parameters, AdamW", native(adam, share_parameters=True), adam, quick=False),
    _mode('ParameterServer("sync")', native(sgd, strategy=mpisgd.ParameterServer("sync")), quick=False),
    _mode("Sharded(stage=1)", native(sgd, strategy=mpisgd.Sharded(1))),
    _mode("Sharded(stage=2), AdamW", native(adam, strategy=mpisgd.Sharded(2)), adam),
    _mode("saved and resumed", resumed, adam),
    _mode("one rank fewer from the middle on", fewer_ranks, sizes=(2, 2**31)),
    _mode("mpisgd.horovod", horovod),
)
