"""torch's DistributedDataParallel over MPI: only the backend's name is new.

mpirun -n 2 python scripts/tutorial/ddp.py
"""

import torch
import torch.distributed as dist
from digits import batches, network
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train for three epochs."""
    dist.init_process_group("mpisgd")  # no MASTER_ADDR, no port: the ranks come from MPI
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        for inputs, targets in batches(dist.get_rank(), dist.get_world_size()):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        dist.all_reduce(mean := loss.detach(), dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
