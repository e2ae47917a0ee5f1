"""Which way a collective goes for ranks of one host: through shared memory, or MPI's own.

The answer depends on what the handshake compares (the collective, sizes, the group), so all ranks agree.
"""

from mpisgd.comm.group import Group
from mpisgd.comm.node.plane import NodePlane

__all__ = ["NEVER", "NODE_FROM_BYTES", "node_plane"]

NEVER = 2**63
# From how many bytes on (of the larger side of a rank) the node plane is taken. Small messages are fast there
# because the handshake is their only meeting; for large ones two copies through the cache take less time than
# MPI's one from address space to address space. Only a tiny all-to-all is better off with MPI's: finding out
# what goes where takes longer here than the messages. Measured with
# `mpirun -n 2 python -m mpisgd bench collectives --sizes 4KiB,64KiB,1MiB,16MiB,64MiB`, and with -n 4.
NODE_FROM_BYTES = {
    "broadcast": 0,
    "gather": 0,
    "scatter": 0,
    "all_gather": 0,
    "all_gather_ragged": 0,
    "all_to_all": 8 * 2**10,
    "all_to_all_of_any_sizes": 0,
    "reduce": 0,
    "reduce_scatter": 0,
    "coalesced": 0,
}


def node_plane(group: Group, kind: str, nbytes: int = 0) -> NodePlane | None:
    """Return the plane that `kind` on `nbytes` goes through, None where MPI's own is to be taken.

    Args:
        group: of the operation.
        kind: one of NODE_FROM_BYTES.
        nbytes: of the larger side of a rank; left out where ranks do not know each other's sizes.
    """
    return group.plane if nbytes >= NODE_FROM_BYTES[kind] else None
