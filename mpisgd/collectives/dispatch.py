"""Which way a collective goes for ranks of one host: through shared memory, or MPI's own.

The answer depends on what the handshake compares (the collective, sizes, the group), and on the job's profile
where `tune` has measured the collective, so all ranks agree.
"""

from mpisgd.core.group import Group
from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["NODE_FROM_BYTES", "TUNED", "shm_transport"]

WAYS = ("node", "mpi")
TUNED = ("broadcast", "all_gather", "all_to_all")  # those of which MPI's own may be the better one
# From how many bytes on (of the larger side of a rank) the node plane is taken where nobody has measured.
# Small messages are fast there because the handshake is their only meeting; for large ones two copies through
# the cache may take less time than MPI's one between address spaces. That is a matter of the machine: 16 MiB
# took an all-gather 0.7 of MPI's time on an AMD EPYC and 1.3 times as long on an Intel Xeon, hence `tune`. Up
# to 2 MiB MPI's own all_gather and all_to_all won on the Xeon, and on the EPYC their time and a handshake's
# came to as much as the plane's; 4 ranks on 2 cores lost a tenth by it or won a third. Measured with
# `mpirun -n 2 python -m mpisgd bench collectives --sizes 4KiB,64KiB,1MiB,16MiB,64MiB`, and with -n 4.
NODE_FROM_BYTES = {
    "broadcast": 0,
    "gather": 0,
    "scatter": 0,
    "all_gather": 2 * 2**20,
    "all_gather_list": 0,  # MPI's would need scratch
    "all_gather_ragged": 0,
    "all_to_all": 2 * 2**20,
    "all_to_all_of_any_sizes": 0,
    "reduce": 0,
    "reduce_scatter": 0,
    "coalesced": 0,
}


def shm_transport(group: Group, kind: str, nbytes: int = 0) -> ShmTransport | None:
    """Return the plane that `kind` on `nbytes` goes through, None where MPI's own is to be taken.

    Args:
        group: of the operation.
        kind: one of NODE_FROM_BYTES.
        nbytes: of the larger side of a rank; left out where ranks do not know each other's sizes.
    """
    plane = group.shm
    if plane is None:
        return None
    if kind in group.costs.collectives:
        return plane if group.costs.choose(WAYS, nbytes, collective=kind) == "node" else None
    return plane if nbytes >= NODE_FROM_BYTES[kind] else None
