"""A feed-forward block cut by columns, then by rows: python tensor_parallel.py BACKEND."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 3


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.relu(self.in_proj(x)))


def main(backend: str) -> None:
    dist.init_process_group(backend)
    torch.manual_seed(11)  # every rank has the whole model and the whole batch
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
    model = parallelize_module(ToyModel().double(), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    inputs, labels = torch.randn(20, 10).double(), torch.randn(20, 5).double()
    for step in range(STEPS):
        loss = nn.functional.mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"tensor parallel: step {step} {loss.item():.14f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
