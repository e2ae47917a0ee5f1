"""`reduce`: everyone's tensor becomes one, on one rank."""

from torch import Tensor

from mpisgd.comm.buffers import Landing, check_output, readable
from mpisgd.comm.collectives.common import operation_on
from mpisgd.comm.dtypes import ReduceOp, check_op, for_mpi
from mpisgd.comm.group import Group
from mpisgd.comm.job import group_or_world
from mpisgd.comm.work import Work

__all__ = ["reduce"]


def reduce(
    tensor: Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `tensor` over the group into the one of rank `dst`; the others keep theirs.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: same shape and dtype on every rank; overwritten on `dst`, unchanged elsewhere.
        dst: global rank of the one that gets the result.
        op: elementwise combination; AVG is SUM divided by `group.size`.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensor alone until its `wait()`.

    Raises:
        UnsupportedTensor, UnsupportedOp, InvalidRank: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.

    Source: MPI standard, MPI_Reduce.
    """
    group = group_or_world(group)
    check_output("reduce", tensor)
    op = check_op("reduce", op, tensor.dtype)
    root = group.group_rank("reduce", "dst", dst)

    def action() -> None:
        landing = Landing(tensor, keep=True) if group.rank == root else None
        flat = landing.flat if landing is not None else readable(tensor)
        work, name, finish = for_mpi(flat, op, group.size)
        group.lane.wire.reduce(work, name, root)
        if landing is not None:
            landing.settle(finish(work))

    return group.lane.run(
        operation_on("reduce", tensor, op=op, root=root), action, tensors=[tensor], async_op=async_op
    )
