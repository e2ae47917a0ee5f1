"""Tensor parallel training: each rank has some columns, then some rows, of each pair of layers.

    mpirun -n 2 python scripts/tutorial/tensor_parallel.py

All ranks see the whole batch. Between the two layers of a pair nothing is sent; after the second the ranks
add up their parts.
"""

import torch
import torch.distributed as dist
from digits import batches, network
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mpisgd


def main() -> None:
    """Train for three epochs."""
    dist.init_process_group("mpisgd")
    layers, size = network(), dist.get_world_size()
    if (columns := layers[0].out_features) % size:
        raise mpisgd.JobError(f"{columns} columns cannot be divided evenly: start this on 1, 2, 4 or 8 ranks")
    mesh = init_device_mesh("cpu", (size,))
    model = parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    for epoch in range(3):
        for inputs, targets in batches():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
