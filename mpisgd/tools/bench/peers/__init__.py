"""Other frameworks to measure beside: each in processes of its own, one beside every rank.

Each rank requests one turn of the measurement after the other from its process, so that the rounds of all
frameworks alternate. Most frameworks need nothing but a process. Horovod is fastest over MPI, and a child of
a rank cannot be a rank: its processes are the ranks of a second job, on one host.

    mpirun -n 2 python -m mpisgd bench                  rank 0 ======== rank 1
                                                           | socket        | socket
    python -m mpisgd.tools.bench.peers.worker, twice          gloo 0 -------- gloo 1
    mpirun -n 2 python -m mpisgd.tools.bench.peers.worker     rank 0 ======== rank 1
"""
