"""What `MpirunBackend` starts under mpirun: run one program after the other, as long as the job is sound.

Rank 0 takes programs from a socket and answers with verdicts. The ranks tell each other what they have
seen over a communicator of their own: it must not depend on what is being tested.

    python -m mpisgd.tools.verification.programs.mpirun_worker SOCKET TIMEOUT_S
"""

from __future__ import annotations

import gc
import sys
import warnings
from multiprocessing.connection import Client, Connection

import torch

import mpisgd
from mpisgd.tools.verification.programs.program import parse
from mpisgd.tools.verification.programs.try_out import try_out


def main() -> None:
    """Serve until the socket is closed or a program has left the job in an unknown state."""
    address, timeout_s = sys.argv[1], float(sys.argv[2])
    torch.set_num_threads(1)
    mpisgd.init(timeout_s=timeout_s, num_threads=1)
    from mpi4py import MPI

    referee = MPI.COMM_WORLD.Dup()
    rank = referee.rank
    connection = Client(address, "AF_UNIX") if rank == 0 else None
    gc.freeze()
    warnings.simplefilter("ignore")
    while text := referee.bcast(_received(connection)):
        verdict = try_out(parse(text), rank, referee.allgather)
        if connection is not None:
            connection.send(verdict)
        if not verdict.is_healthy:
            MPI.COMM_WORLD.Abort(3)
    mpisgd.shutdown()


def _received(connection: Connection | None) -> str:
    """Return the text of the next program, "" after the last one."""
    if connection is None:
        return ""
    try:
        return str(connection.recv())
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
