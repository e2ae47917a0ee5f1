"""Training that goes on when a rank is lost. Rank 1 of three ends itself in the middle, to show it.

    mpirun --with-ft ulfm -n 3 python scripts/tutorial/elastic.py

The others go back to the last commit, divide the data again and continue as two. With any other number of
ranks, none is lost.
"""

import os
import signal

import torch
from digits import batches, network

import mpisgd


def main() -> None:
    """Train for three epochs."""
    mpisgd.init()
    if mpisgd.size() == 3 and "OMPI_MCA_mpi_ft_enable" not in os.environ:
        raise mpisgd.JobError(
            "the loss of a rank would end this job: start this with mpirun --with-ft ulfm -n 3"
        )
    model = network()
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    state = mpisgd.elastic.State(model=model, optimizer=optimizer, epoch=0, losses=[])

    @mpisgd.elastic.run
    def train(state: mpisgd.elastic.State) -> None:
        while state.epoch < 3:
            for step, (inputs, targets) in enumerate(batches(mpisgd.rank(), mpisgd.size())):
                if (state.epoch, step, mpisgd.rank(), mpisgd.size()) == (1, 3, 1, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
            mpisgd.all_reduce(mean := loss.detach(), mpisgd.ReduceOp.AVG)
            if mpisgd.rank() == 0:
                print(f"epoch {state.epoch}: loss {mean.item():.4f} on {mpisgd.size()} ranks", flush=True)
            state.epoch += 1
            state.commit()

    train(state)


if __name__ == "__main__":
    main()
