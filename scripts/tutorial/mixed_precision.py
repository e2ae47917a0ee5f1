"""Mixed precision: layers compute in bfloat16, parameters stay float32, and gradients travel as bfloat16.

    mpirun -n 2 python scripts/tutorial/mixed_precision.py

bfloat16 has the range of float32, so the loss needs no scaling. With float16, as older GPUs have it, small
gradients would become zero: there `torch.amp.GradScaler` scales the loss, as on one process.
"""

import torch
from digits import batches, network

import mpisgd


def main() -> None:
    """Train for three epochs."""
    mpisgd.init()
    model = network()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=mpisgd.Compression.bf16,  # summed in float32
    )
    for epoch in range(3):
        for inputs, targets in batches(mpisgd.rank(), mpisgd.size()):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        mpisgd.all_reduce(mean := loss.detach().float(), mpisgd.ReduceOp.AVG)
        if mpisgd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
