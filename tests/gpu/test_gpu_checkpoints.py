"""Checkpoints of a model on a GPU: its random numbers too, and a snapshot while it trains."""

from __future__ import annotations

from pathlib import Path

import torch
from gpu_under_test import DEVICE
from torch import nn
from verdicts import everyone, referee

import mpisgd
from mpisgd import checkpoint


class Run:
    """A model with dropout, and its optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed + mpisgd.rank())
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)).to(DEVICE)
        mpisgd.broadcast_parameters(self.model)
        self.optimizer = mpisgd.DistributedOptimizer(torch.optim.Adam(self.model.parameters(), fused=True))

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(8, 4, device=DEVICE)).square().mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def test_a_resumed_run_continues_bit_by_bit_on_a_gpu(tmp_path_factory) -> None:
    folder = Path(referee().bcast(str(tmp_path_factory.mktemp("saved"))))
    run = Run(1)
    run.train(3)
    with checkpoint.Writer(folder) as writer:
        writer.save(3, model=run.model, optimizer=run.optimizer)
        expected = run.train(4)
    resumed = Run(50)
    checkpoint.load(folder, model=resumed.model, optimizer=resumed.optimizer)
    losses = resumed.train(4)
    everyone(losses == expected, f"{losses} != {expected}")
