"""A division trained inside `join()`, on a rank; and the same in one process, written from the definition."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.tools.verification.programs.option_text import evaluated
from uneven.division import NO_SYNC, PASSES, SHAPES, Division, rows_of

RATE, MOMENTUM, DECAY, MAX_NORM, SCALE = 0.25, 0.5, 0.5, 0.5, 4.0


def parameters() -> list[nn.Parameter]:
    """Return those at the beginning."""
    return [
        nn.Parameter(torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) / 4)
        for shape in SHAPES
    ]


def _sgd(params: Sequence[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=RATE, momentum=MOMENTUM)


def _scaler() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10_000)
    scaler.scale(torch.zeros(()))
    return scaler


def _loss(division: Division, params: Sequence[nn.Parameter], rank: int, batch: int) -> Tensor:
    rows = rows_of(division, rank, batch)
    losses = [(param * row).flatten(1).sum(1).mean() for param, row in zip(params, rows, strict=True)]
    total = torch.stack(losses).sum() / division.accumulates
    return total * math.inf if division.overflows == (rank, batch) else total


def train(division: Division) -> list[Tensor]:
    """Train this rank with the others; return its parameters, and the momentum, at the end. Collective."""
    params, rank = parameters(), mpisgd.rank()
    name, _, text = division.method.partition("=")
    options: dict[str, Any] = {name: evaluated(text)} if name else {}
    if division.way == PASSES:
        options["backward_passes_per_step"] = division.accumulates
    optimizer = mpisgd.DistributedOptimizer(_sgd(params), **options)
    scaler = _scaler() if division.scaled else None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY) if division.scheduled else None
    follow = [each for each in (scaler, scheduler) if each is not None]
    with optimizer.join(follow=follow or None) as uneven:
        for batch, count in enumerate(division.batches[rank]):
            if division.gives_examples:
                uneven.next_batch(examples=count)
            last = (batch + 1) % division.accumulates == 0
            with optimizer.no_sync() if division.way == NO_SYNC and not last else contextlib.nullcontext():
                loss = _loss(division, params, rank, batch)
                (loss if scaler is None else scaler.scale(loss)).backward()
            if last:
                _finish_step(division, optimizer, params, scaler, scheduler)
    told: list[Any] = [None] * mpisgd.size()
    mine = (
        scheduler and scheduler.state_dict(),
        scaler and scaler.state_dict(),
        optimizer.param_groups[0]["lr"],
    )
    mpisgd.all_gather_object(told, mine)
    assert all(each == told[0] for each in told), f"ranks keep different counts: {told}"
    if not division.is_local:
        mpisgd.check_in_sync(optimizer)
    return [param.detach().clone() for param in params]


def _finish_step(
    division: Division, optimizer: Any, params: Sequence[nn.Parameter], scaler: Any, scheduler: Any
) -> None:
    if division.clips:
        if scaler is not None:
            scaler.unscale_(optimizer)
        if division.clips == "by torch":
            nn.utils.clip_grad_norm_(params, MAX_NORM, math.inf)
        else:
            optimizer.clip_grad_norm_(MAX_NORM, math.inf)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if "overlap_forward" in division.method and hasattr(optimizer, "synchronizer"):
        optimizer.synchronizer.wait()  # no module waits for them here
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad()


# --- one process --------------------------------------------------------------------------------------


def in_one_process(division: Division) -> list[list[Tensor]]:
    """Return the parameters of each rank at the end, by the definition of `join()`."""
    if division.is_local:
        return _local(division)
    params, by_torch = parameters(), replace(division, clips=division.clips and "by torch")
    optimizer, scaler = _sgd(params), _scaler() if division.scaled else None
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY) if division.scheduled else None
    for step in range(max(map(len, division.batches)) // division.accumulates):
        grads = _joined_gradients(division, step, 1.0 if scaler is None else float(scaler.get_scale()))
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        _finish_step(by_torch, optimizer, params, scaler, scheduler)
    return [[param.detach().clone() for param in params]] * division.size


def _joined_gradients(division: Division, step: int, scale: float) -> list[Tensor]:
    """Return the gradient of the mean over all rows of a step; over batches where none are given."""
    passes = division.accumulates
    there = [
        (rank, batch)
        for rank, batches in enumerate(division.batches)
        for batch in range(step * passes, min((step + 1) * passes, len(batches)))
    ]
    most = max(sum(rank == r for r, _ in there) for rank, _ in there)
    weights = [division.batches[r][b] if division.gives_examples else 1 for r, b in there]
    infinite = division.overflows in there
    grads = []
    for place in range(len(SHAPES)):
        means = [rows_of(division, r, b)[place].mean(0) / passes * scale for r, b in there]
        if division.sums:
            total = torch.stack(means).sum(0)
        else:
            ratio = Fraction(most, sum(weights))
            total = torch.stack([w * mean for w, mean in zip(weights, means, strict=True)]).sum(0)
            total = total * ratio.numerator / ratio.denominator
        grads.append(total * math.inf if infinite else total)
    return grads


def _local(division: Division) -> list[list[Tensor]]:
    """Return the same where ranks step by themselves: means count the examples of each since the last one."""
    models = [parameters() for _ in division.batches]
    optimizers = [_sgd(params) for params in models]
    outer = [param.detach().clone() for param in models[0]]
    slow = torch.optim.SGD([nn.Parameter(each) for each in outer], lr=0.7, momentum=0.9, nesterov=True)
    counts, rate = [0] * division.size, RATE
    every = int(division.method.split("sync_every=")[1][0])
    for step in range(max(map(len, division.batches))):
        for rank, (params, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if step < len(division.batches[rank]):
                optimizer.param_groups[0]["lr"] = rate
                optimizer.zero_grad()
                _loss(division, params, rank, step).backward()
                optimizer.step()
                counts[rank] += division.batches[rank][step] if division.gives_examples else 1
        rate *= DECAY if division.scheduled else 1.0
        if (step + 1) % every == 0:
            _take_mean(division, models, counts, slow)
            counts = [0] * division.size
    return [[param.detach().clone() for param in params] for params in models]


def _sum(values: Sequence[Tensor], ranks_per_host: Sequence[int]) -> Tensor:
    """Add up those of each host, and then these sums: that order is the only one that rounds alike."""
    left, totals = list(values), []
    for count in ranks_per_host:
        total = torch.zeros_like(left[0])
        for _ in range(count):
            total = total + left.pop(0)
        totals.append(total)
    result = totals[0]
    for total in totals[1:]:
        result = result + total
    return result


@torch.no_grad()
def _take_mean(
    division: Division, models: Sequence[Sequence[nn.Parameter]], counts: Sequence[int], slow: torch.optim.SGD
) -> None:
    unit = math.gcd(*filter(None, counts))
    z = slow.param_groups[0]["params"]
    is_outer = "DiLoCo" in division.method
    for place in range(len(SHAPES)):
        values = [z[place] - m[place] if is_outer else m[place] for m in models]
        weighted = [n // unit * value for n, value in zip(counts, values, strict=True)]
        mean = _sum(weighted, division.ranks_per_host) / (sum(counts) // unit)
        if is_outer:
            z[place].grad = mean
        else:
            z[place].copy_(mean)
    if is_outer:
        slow.step()
    for params in models:
        for param, value in zip(params, z, strict=True):
            param.copy_(value)
