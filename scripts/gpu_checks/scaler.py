"""Mixed precision with the optimizer's state in host memory: what overflows on one rank is skipped by all."""

from __future__ import annotations

import torch
from torch import nn

import mpisgd
from gpu_checks.finding import Finding
from gpu_checks.gpu import Gpu

__all__ = ["overflow_with_offload"]

STEPS, OVERFLOWS = 6, (2, 4)
SCALE = 8.0
TOLERANCE = 1e-6  # of float32; the means are added in another order


def overflow_with_offload(gpu: Gpu) -> Finding:
    """`Sharded(1, offload=Offload())` with a GradScaler trains as without an offload."""
    plain, plain_scale, _ = _train(gpu, mpisgd.Sharded(1))
    ours, scale, moved = _train(gpu, mpisgd.Sharded(1, offload=mpisgd.Offload()))
    off = max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))
    wanted = SCALE / 2 ** len(OVERFLOWS)
    is_finite = all(bool(param.isfinite().all()) for param in ours)
    return Finding.of(
        off < TOLERANCE and is_finite and scale == plain_scale == wanted and not moved,
        f"scale {wanted:g}; steps that overflow on rank 0 move no parameter; otherwise as without offload",
        f"scale {scale:g}; {len(moved)} such steps moved one; off by {off:.2g}",
    )


def _train(gpu: Gpu, strategy: mpisgd.Strategy) -> tuple[list[torch.Tensor], float, list[int]]:
    """Parameters, the last scale, and the steps that overflowed and changed parameters even so."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)).to(gpu.kind)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), strategy=strategy)
    scaler = torch.amp.GradScaler(gpu.kind, init_scale=SCALE)
    moved = []
    for step in range(STEPS):
        before = [param.detach().clone() for param in model.parameters()]
        draw = torch.Generator().manual_seed(step)
        inputs = torch.randn(12, 4, generator=draw).chunk(mpisgd.size())[mpisgd.rank()].to(gpu.kind)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        overflows = step in OVERFLOWS
        if overflows and mpisgd.rank() == 0:  # in one element, of which another rank may have the state
            loss = loss + model[2].bias[-1] * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if overflows and any(bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True)):
            moved.append(step)
    return [param.detach().cpu() for param in model.parameters()], scaler.get_scale(), moved
