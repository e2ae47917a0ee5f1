"""A toy model under DDP, saved by one rank and loaded by all: python ddp_toy.py BACKEND."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH = 3, 20


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def train(model: DDP, rank: int, size: int) -> list[float]:
    torch.manual_seed(5)
    inputs, labels = torch.randn(BATCH, 10).double(), torch.randn(BATCH, 5).double()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[rank::size]), labels[rank::size])
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / size)
        losses.append(mean.item())
    return losses


def main(backend: str) -> None:
    dist.init_process_group(backend)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(100 + rank)  # DDP gives all ranks the parameters of rank 0
    model = DDP(ToyModel().double())
    paths = [tempfile.mktemp(suffix=".pt") if rank == 0 else None]
    dist.broadcast_object_list(paths)
    losses = train(model, rank, size)
    if rank == 0:
        torch.save(model.state_dict(), paths[0])
    dist.barrier()
    other = DDP(ToyModel().double())
    other.load_state_dict(torch.load(paths[0], weights_only=True))
    dist.barrier()
    if rank == 0:
        os.remove(paths[0])
    losses += train(other, rank, size)
    if rank == 0:
        print("\n".join(f"toy: step {step} {loss:.14f}" for step, loss in enumerate(losses)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
