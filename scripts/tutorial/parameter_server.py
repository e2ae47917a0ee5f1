"""A parameter server without waiting: each rank pushes its gradient and takes the newest parameters.

    mpirun -n 2 python scripts/tutorial/parameter_server.py

Every rank has a part of the parameters in memory that the others read and write. `ssp` lets the fastest rank
be three steps ahead of the slowest, `async` any number. scripts/rpc/rpc_parameter_server.py is a server over
RPC, written out.
"""

import torch
from digits import batches, network

import mpisgd


def main() -> None:
    """Train for three epochs."""
    mpisgd.init()
    model = network()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2),
        named_parameters=model.named_parameters(),
        strategy=mpisgd.ParameterServer("ssp", staleness_steps=3),
    )
    for epoch in range(3):
        for inputs, targets in batches(mpisgd.rank(), mpisgd.size()):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if mpisgd.rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    optimizer.synchronizer.finish()  # now all ranks have the same parameters


if __name__ == "__main__":
    main()
