"""Data parallel training with `mpisgd.DistributedOptimizer`: four lines more than on one process.

mpirun -n 2 python scripts/tutorial/data_parallel.py
"""

import torch
from digits import batches, network

import mpisgd


def main() -> None:
    """Train for three epochs."""
    mpisgd.init()
    model = network()
    mpisgd.broadcast_parameters(model)  # all start from rank 0's
    optimizer = mpisgd.DistributedOptimizer(  # backward() returns with the gradients averaged over the ranks
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
    )
    for epoch in range(3):
        for inputs, targets in batches(mpisgd.rank(), mpisgd.size()):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        mpisgd.all_reduce(mean := loss.detach(), mpisgd.ReduceOp.AVG)
        if mpisgd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
