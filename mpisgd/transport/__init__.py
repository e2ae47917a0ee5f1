"""How bytes move: shared memory, cross-memory attach, between hosts, MPI itself, NCCL and pinned memory."""
