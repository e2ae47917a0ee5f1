"""What the programs that train with a framework share: data, a model, and its training in one process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_STEPS, BATCH_SIZE = 4, 3  # of each rank


def make_data(num_ranks: int) -> TensorDataset:
    """Make one epoch of data, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(NUM_STEPS * BATCH_SIZE * num_ranks, 5, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs.prod(1, keepdim=True))


def make_net(seed: int) -> nn.Module:
    """Make a small network."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Make an optimizer that remembers earlier steps."""
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def loss_of(net: nn.Module, batch: Iterable[Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    inputs, targets = batch
    return nn.functional.mse_loss(net(inputs), targets)


def max_difference(net: nn.Module, num_ranks: int, *, shuffle: bool = False) -> float:
    """Train in one process on the joined batches; return how far `net`'s weights are from that.

    Args:
        shuffle: take the data in the order that n DistributedSamplers, all with their defaults, share.
    """
    data = make_data(num_ranks)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=shuffle)
    alone = make_net(seed=0)
    optimizer = make_optimizer(alone)
    for batch in DataLoader(data, batch_size=BATCH_SIZE * num_ranks, sampler=sampler):
        optimizer.zero_grad()
        loss_of(alone, batch).backward()
        optimizer.step()
    pairs = zip(net.parameters(), alone.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
