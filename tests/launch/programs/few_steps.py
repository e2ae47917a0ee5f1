"""Train a small model for some steps, and leave a file for each rank that ends as it should: STEPS FOLDER."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path

import torch

import mpisgd


def main(num_steps: int, folder: Path) -> None:
    """Train; each rank has its own data."""
    mpisgd.init()
    ended = folder / f"{mpisgd.size()} ranks, rank {mpisgd.rank()}"
    atexit.register(ended.touch)  # runs before mpisgd's own, which is what waits for the others
    torch.manual_seed(mpisgd.rank())
    model = torch.nn.Linear(64, 10)
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    print("trained to the end")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
