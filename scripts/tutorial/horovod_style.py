"""A program for Horovod: only the import is new.

mpirun -n 2 python scripts/tutorial/horovod_style.py
"""

import torch
from digits import batches, network

import mpisgd.horovod as hvd


def main() -> None:
    """Train for three epochs."""
    hvd.init()
    model = network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
    )
    for epoch in range(3):
        for inputs, targets in batches(hvd.rank(), hvd.size()):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
