"""Data parallel training with nothing but `all_reduce`: what every other way comes down to.

    mpirun -n 2 python scripts/tutorial/average_by_hand.py

Each rank computes the gradient of its share of the batch. The mean of these is the gradient of the whole
batch, so all ranks take the same step and their models stay equal.
"""

import torch
from digits import batches, network

import mpisgd


def main() -> None:
    """Train for three epochs."""
    mpisgd.init()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(3):
        for inputs, targets in batches(mpisgd.rank(), mpisgd.size()):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            for parameter in model.parameters():
                mpisgd.all_reduce(parameter.grad)
                parameter.grad /= mpisgd.size()
            optimizer.step()
        mpisgd.all_reduce(mean := loss.detach(), mpisgd.ReduceOp.AVG)
        if mpisgd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
