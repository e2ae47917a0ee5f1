"""Data parallel by hand: a seeded partition of the digits, and gradients averaged after every backward pass.

    python averaged_gradients.py BACKEND

Rank r takes every n-th of the shuffled images, so that the r-th batches of all ranks are the r-th batch of
one process.
"""

import random
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

BATCH, EPOCHS, IMAGES = 128, 3, 1024


class DataPartitioner:
    """Hands every rank its share of a data set, shuffled in the same way everywhere."""

    def __init__(self, data: Dataset, size: int, seed: int = 1234) -> None:
        self.data, self.size = data, size
        self.order = list(range(IMAGES))
        random.Random(seed).shuffle(self.order)

    def use(self, rank: int) -> Subset:
        return Subset(self.data, self.order[rank :: self.size])


def partition_dataset() -> DataLoader:
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data / 16), torch.tensor(digits.target)
    size = dist.get_world_size()
    share = DataPartitioner(TensorDataset(pixels, labels), size).use(dist.get_rank())
    return DataLoader(share, batch_size=BATCH // size)


def average_gradients(model: nn.Module) -> None:
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= size


def main(backend: str) -> None:
    dist.init_process_group(backend)
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    batches = partition_dataset()
    for epoch in range(EPOCHS):
        epoch_loss = torch.zeros((), dtype=torch.float64)
        for pixels, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pixels), labels)
            epoch_loss += loss.detach() / len(batches)
            loss.backward()
            average_gradients(model)
            optimizer.step()
        dist.all_reduce(epoch_loss)
        if dist.get_rank() == 0:
            print(f"averaged: epoch {epoch} {epoch_loss.item() / dist.get_world_size():.14f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
