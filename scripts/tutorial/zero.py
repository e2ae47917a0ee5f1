"""ZeRO: what data parallel ranks all hold is divided among them.

    mpirun -n 2 python scripts/tutorial/zero.py
    mpirun -n 2 python scripts/tutorial/zero.py 3

Stage 1 divides the optimizer's state (`ZeroRedundancyOptimizer`), stage 3 parameters and gradients too
(`fully_shard`, each layer gathered when it is needed). The losses are those of ddp.py.
"""

import sys

import torch
import torch.distributed as dist
from digits import batches, network
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def prepare(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer of a stage."""
    settings = {"lr": 0.05, "momentum": 0.9}
    if stage == 1:
        model = DistributedDataParallel(network())
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **settings)
    layers, mesh = network(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    sharded = fully_shard(layers, mesh=mesh)
    return sharded, torch.optim.SGD(sharded.parameters(), **settings)


def main(stage: int) -> None:
    """Train for three epochs."""
    dist.init_process_group("mpisgd")
    model, optimizer = prepare(stage)
    for epoch in range(3):
        for inputs, targets in batches(dist.get_rank(), dist.get_world_size()):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        dist.all_reduce(mean := loss.detach(), dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
