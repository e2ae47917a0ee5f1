"""Each rank prints where it is: its rank and the job's size, the same on its host, and the host."""

import socket
import sys

import mpisgd

mpisgd.init()
ranks = [None] * mpisgd.size()
mpisgd.all_gather_object(ranks, mpisgd.rank())
assert ranks == list(range(mpisgd.size()))
found = mpisgd.rank(), mpisgd.size(), mpisgd.local_rank(), mpisgd.local_size(), socket.gethostname()
sys.stdout.write(" ".join(map(str, found)) + "\n")  # in one piece: the ranks share a file
