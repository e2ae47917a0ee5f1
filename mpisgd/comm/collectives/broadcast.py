"""`broadcast`: one rank's tensor becomes everyone's."""

from torch import Tensor

from mpisgd.comm.buffers import Landing, check_output, readable
from mpisgd.comm.collectives.common import operation_on
from mpisgd.comm.group import Group
from mpisgd.comm.job import group_or_world
from mpisgd.comm.work import Work

__all__ = ["broadcast"]


def broadcast(tensor: Tensor, src: int, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Copy the tensor of rank `src` into everyone's.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: same shape and dtype on every rank; unchanged on `src`, overwritten elsewhere.
        src: global rank of the one that has the values.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensor alone until its `wait()`.

    Raises:
        UnsupportedTensor, InvalidRank: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.

    Source: MPI standard, MPI_Bcast.
    """
    group = group_or_world(group)
    check_output("broadcast", tensor)
    root = group.group_rank("broadcast", "src", src)

    def action() -> None:
        if group.rank == root:
            group.lane.wire.broadcast(readable(tensor), root)
        else:
            landing = Landing(tensor, keep=False)
            group.lane.wire.broadcast(landing.flat, root)
            landing.settle()

    return group.lane.run(
        operation_on("broadcast", tensor, root=root), action, tensors=[tensor], async_op=async_op
    )
