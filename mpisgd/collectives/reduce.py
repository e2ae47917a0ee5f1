"""`reduce`: everyone's tensor becomes one, on one rank."""

from collections.abc import Iterator

from torch import Tensor

from mpisgd.accelerator.buffers import StagedOutput, readable
from mpisgd.collectives.common import direct_of, operation_on, run, run_in_steps
from mpisgd.collectives.dispatch import shm_transport
from mpisgd.collectives.tensor_arguments import check_output
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp, check_op
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.mpi_reduction import for_mpi
from mpisgd.transport.shm import reduction
from mpisgd.transport.shm.transport import ShmTransport

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

    Cost: on one host, through shared memory; else MPI_Reduce.
    """
    group = group_or_world(group)
    check_output("reduce", tensor)
    op = check_op("reduce", op, tensor.dtype)
    root = group.group_rank("reduce", "dst", dst)
    operation = operation_on("reduce", tensor, op=op, root=root)
    if (direct := direct_of(group, operation, tensor, op=op)) is not None:
        return direct.reduce(operation, tensor, root, op, async_op)
    if (plane := shm_transport(group, "reduce", tensor.nbytes)) is not None:
        steps = _on_node(plane, tensor, op, root)
        return run_in_steps(group, plane, operation, steps, tensors=[tensor], async_op=async_op)

    def action() -> None:
        landing = StagedOutput(tensor, keep=True) if group.rank == root else None
        flat = landing.flat if landing is not None else readable(tensor)
        work, name, finish = for_mpi(flat, op, group.size)
        group.queue.wire.reduce(work, name, root)
        if landing is not None:
            landing.settle(finish(work))

    return run(group, operation, action, tensors=[tensor], async_op=async_op, like=tensor)


def _on_node(plane: ShmTransport, tensor: Tensor, op: ReduceOp, root: int) -> Iterator[None]:
    if plane.rank == root:
        landing = StagedOutput(tensor, keep=True)
        yield from reduction.reduce(plane, landing.flat, op, root)
        landing.settle()
    else:
        yield from reduction.reduce(plane, readable(tensor), op, root)
