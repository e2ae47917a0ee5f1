"""A model with parameters on the CPU and on a GPU: autograd runs their hooks on several threads at once.

Gradients are added, and not averaged: a bucket that two threads have sent would look right after two means.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import mpisgd
from gpu_checks.finding import Finding
from gpu_checks.gpu import Gpu

__all__ = ["embedding_below_gpu"]

WORDS, WIDTH, BATCH = 50, 8, 6
TOLERANCE = 1e-9  # of float64


class Model(nn.Module):
    """An embedding on the CPU below layers on a GPU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.table = nn.Embedding(WORDS, WIDTH)
        layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.layers = nn.Sequential(*layers).to(device)

    def forward(self, words: Tensor) -> Tensor:
        """Losses of words."""
        losses: Tensor = self.layers(self.table(words).to(self.device)).square().sum(1)
        return losses


def embedding_below_gpu(gpu: Gpu) -> Finding:
    """Steps with tiny buckets equal those of one process on the joined batch."""
    torch.manual_seed(3)
    alone = Model(gpu.kind).double()
    ours = copy.deepcopy(alone)
    plain = torch.optim.SGD(alone.parameters(), lr=0.05)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.05),
        named_parameters=ours.named_parameters(),
        bucket_cap_bytes=64,
        overlap=True,
        op=mpisgd.ReduceOp.SUM,
    )
    steps, rank, size = 20 if gpu.quick else 500, mpisgd.rank(), mpisgd.size()
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        words = torch.randint(WORDS, (BATCH * size,), generator=draw)
        for model, opt, share in ((alone, plain, words), (ours, optimizer, words.chunk(size)[rank])):
            opt.zero_grad()
            (model(share).sum() / len(words)).backward()
            opt.step()
    pairs = zip(ours.parameters(), alone.parameters(), strict=True)
    off = max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
    return Finding.of(
        off < TOLERANCE,
        f"after {steps} steps the parameters of one process, up to {TOLERANCE:g}",
        f"off by {off:.2g}",
    )
