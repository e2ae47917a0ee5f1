"""What the programs of this folder train: a small network that tells handwritten digits apart."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH = 64


def network() -> nn.Sequential:
    """Return the network: the same parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def batches(rank: int = 0, size: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's share of each batch of an epoch: images [n, 64] and labels [n]."""
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    starts = range(0, len(inputs) - BATCH + 1, BATCH)
    mine = range(rank, BATCH, size)
    return [(inputs[start:][mine], targets[start:][mine]) for start in starts]
