"""Four layers in a pipeline, one stage per rank: python pipeline.py BACKEND."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

STEPS, LAYERS, MICRO_BATCHES = 3, 4, 4


def main(backend: str) -> None:
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(LAYERS)]
    inputs, labels = torch.randn(16, 8).double(), torch.randn(16, 8).double()
    mine = nn.Sequential(*layers[rank * LAYERS // size : (rank + 1) * LAYERS // size])
    stage = PipelineStage(mine, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = (inputs,) if rank == 0 else ()
        if rank == size - 1:
            schedule.step(*given, target=labels, losses=losses)
            print(f"pipeline: step {step} {torch.stack(losses).mean().item():.14f}", flush=True)
        else:
            schedule.step(*given)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
