"""DDP that adds up the gradients of micro-batches before it sends: python ddp_accumulation.py BACKEND."""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, ACCUMULATION, BATCH = 4, 3, 8


def main(backend: str) -> None:
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    data = torch.randn(STEPS, ACCUMULATION, BATCH, 5, dtype=torch.float64)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step, micro_batches in enumerate(data):
        total = torch.zeros((), dtype=torch.float64)
        for i, batch in enumerate(micro_batches):
            mine = batch[rank::size]
            last = i == ACCUMULATION - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.mse_loss(model(mine), mine.sum(1, keepdim=True)) / ACCUMULATION
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"accumulated: step {step} {total.item() / size:.14f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
