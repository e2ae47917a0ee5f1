"""A pipeline: each rank has some of the layers, and the batch goes through them in pieces.

mpirun -n 2 python scripts/tutorial/pipeline.py

rank 0   forward 1  forward 2  forward 3 ...              backward 1  backward 2 ...
rank 1              forward 1  backward 1  forward 2  backward 2 ...
"""

import torch
import torch.distributed as dist
from digits import batches, network
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import mpisgd

MICRO_BATCHES = 4


def main() -> None:
    """Train for three epochs; every rank gets the same batches."""
    dist.init_process_group("mpisgd")
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = network()
    if size > (count := sum(isinstance(layer, torch.nn.Linear) for layer in layers)):
        raise mpisgd.JobError(f"the network has {count} layers to train: start this on at most {count} ranks")
    mine = layers[rank * len(layers) // size : (rank + 1) * len(layers) // size]
    stage = PipelineStage(mine, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=torch.nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        for inputs, targets in batches():
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            if rank == size - 1:
                schedule.step(*[inputs] * (rank == 0), target=targets, losses=losses)
            else:
                schedule.step(*[inputs] * (rank == 0))
            optimizer.step()
        if rank == size - 1:
            print(f"epoch {epoch}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
