"""Messages from one rank to another: blocking, and in the background.

    mpirun -n 2 python scripts/tutorial/point_to_point.py

Every rank sends to the next one, around a ring. If all of them began with a blocking `send` they might wait
for each other for ever: so all but rank 0 receive first, or nobody blocks.
"""

import torch

import mpisgd


def blocking(rank: int, size: int) -> torch.Tensor:
    """Pass a tensor on, one rank after the other."""
    tensor = torch.zeros(3)
    if rank == 0:
        mpisgd.send(tensor, dst=1)
        mpisgd.recv(tensor, src=size - 1)
    else:
        mpisgd.recv(tensor, src=rank - 1)
        mpisgd.send(tensor + 1, dst=(rank + 1) % size)
    return tensor


def in_the_background(rank: int, size: int) -> torch.Tensor:
    """Send and receive at the same time. A tensor belongs to its message until `wait()` has returned."""
    mine, received = torch.full((3,), float(rank)), torch.empty(3)
    works = [mpisgd.isend(mine, dst=(rank + 1) % size), mpisgd.irecv(received, src=(rank - 1) % size)]
    for work in works:
        work.wait()
    return received


def main() -> None:
    """Run both, and tell what rank 0 has received."""
    mpisgd.init()
    rank, size = mpisgd.rank(), mpisgd.size()
    if size < 2:
        raise mpisgd.JobError("messages need two ranks: start this with mpirun -n 2 or more")
    passed, neighbours = blocking(rank, size), in_the_background(rank, size)
    if rank == 0:
        print(f"passed around: {passed.tolist()}, from the last rank: {neighbours.tolist()}", flush=True)


if __name__ == "__main__":
    main()
