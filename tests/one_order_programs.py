"""A training that depends on the order of additions, by ranks, and along the tree in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import mpisgd

STEPS = 3
Bits = list[Tensor]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A matrix, a vector, two that are added to each other, one used now and then, and one never."""
    draw = torch.Generator().manual_seed(3)
    shapes = [(7, 5), (3,), (4,), (4,), (2, 3), (2,)]
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]


def loss_of(params: list[nn.Parameter], step: int, micro_batch: int) -> Tensor:
    """Of one micro-batch; its gradients are of very different sizes."""
    draw = torch.Generator().manual_seed(1000 * step + micro_batch)
    matrix, vector, one, other, rare, _ = params

    def product(param: Tensor) -> Tensor:
        sizes = 10.0 ** torch.randint(-3, 4, param.shape, generator=draw)
        factors = sizes * torch.randn(param.shape, generator=draw)
        return (torch.tanh(param) * factors.to(param.dtype)).sum()

    loss = product(matrix) + product(one + other)
    if micro_batch == 0:  # a gradient of -0.0, which the other micro-batches lack
        loss = loss + (vector * -0.0).sum()
    if (step + micro_batch) % 3 == 0:
        loss = loss + product(rare)
    return loss


def optimizer_of(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=0.01)
    return getattr(torch.optim, name)(params, lr=1e-3, weight_decay=0.01)


def along_tree(leaves: list[Tensor | None]) -> Tensor | None:
    """Their sum: halves are added to each other as long as there are any, the rest from left to right."""
    if len(leaves) % 2 == 0:
        half = len(leaves) // 2
        leaves = [along_tree(leaves[:half]), along_tree(leaves[half:])]
    total = leaves[0]
    for leaf in leaves[1:]:
        total = leaf if total is None else total if leaf is None else total + leaf
    return total


class Scaler(torch.amp.GradScaler):
    """Scales losses if it is enabled; in the second step one overflows."""

    def __init__(self, enabled: bool) -> None:
        super().__init__("cpu", init_scale=8.0, growth_interval=2, enabled=enabled)

    def loss_of(self, params: list[nn.Parameter], step: int, micro_batch: int) -> Tensor:
        overflows = self.is_enabled() and (step, micro_batch) == (1, 3)
        return self.scale(loss_of(params, step, micro_batch)) * (float("inf") if overflows else 1.0)


def in_one_process(
    name: str,
    num_micro_batches: int,
    dtype: torch.dtype,
    *,
    divides: bool = True,
    clips: bool = False,
    scales: bool = False,
) -> Bits:
    """Train with the sums of that tree, without mpisgd."""
    params, scaler = parameters(dtype), Scaler(scales)
    optimizer = optimizer_of(name, params)
    for step in range(STEPS):
        grads: list[Any] = [
            torch.autograd.grad(scaler.loss_of(params, step, i), params, allow_unused=True)
            for i in range(num_micro_batches)
        ]
        for param, leaves in zip(params, zip(*grads, strict=True), strict=True):
            total = along_tree(list(leaves))
            param.grad = None if total is None else total / (num_micro_batches if divides else 1) + 0.0
        if clips:
            nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
    return bits(params)


def by_ranks(
    name: str,
    num_micro_batches: int,
    dtype: torch.dtype,
    *,
    clips: bool = False,
    scales: bool = False,
    num_optimizers: int = 1,
    **options: Any,
) -> Bits:
    """Train on this rank's micro-batches, together with the others; the parameters may be divided."""
    params, scaler = parameters(dtype), Scaler(scales)
    each = num_micro_batches // mpisgd.size()
    parts = [params[i::num_optimizers] for i in range(num_optimizers)]
    optimizers = [
        mpisgd.DistributedOptimizer(optimizer_of(name, part[:1]), backward_passes_per_step=each, **options)
        for part in parts
    ]
    for optimizer, part in zip(optimizers, parts, strict=True):
        optimizer.add_param_group({"params": part[1:]})
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for i in range(each):
            scaler.loss_of(params, step, mpisgd.rank() * each + i).backward()
        for optimizer in optimizers:
            if clips:
                optimizer.clip_grad_norm_(1.0)
            scaler.step(optimizer)
        scaler.update()
    return bits(params)


def bits(params: list[nn.Parameter]) -> Bits:
    """Parameters and gradients as integers, so that 0.0 is not -0.0."""
    tensors = [t for param in params for t in (param.detach(), param.grad) if t is not None]
    return [tensor.contiguous().clone().view(torch.uint8) for tensor in tensors]


def are_equal(one: Bits, other: Bits) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
