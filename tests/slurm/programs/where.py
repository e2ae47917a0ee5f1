"""Each rank prints where it is: its rank and the job's size, the same on its host, and the host."""

import socket

import mpisgd

mpisgd.init()
ranks = [None] * mpisgd.size()
mpisgd.all_gather_object(ranks, mpisgd.rank())
assert ranks == list(range(mpisgd.size()))
print(
    mpisgd.rank(), mpisgd.size(), mpisgd.local_rank(), mpisgd.local_size(), socket.gethostname(), flush=True
)
