"""`broadcast`: one rank's tensor becomes everyone's."""

from collections.abc import Iterator

from torch import Tensor

from mpisgd.accelerator.buffers import StagedOutput, readable
from mpisgd.collectives.common import direct_of, operation_on, run, run_in_steps
from mpisgd.collectives.dispatch import shm_transport
from mpisgd.collectives.tensor_arguments import check_output
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.shm import data_movement
from mpisgd.transport.shm.staging import range_of
from mpisgd.transport.shm.transport import ShmTransport

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

    Cost: on one host, where that is quicker (`tune`), root copies it into shared memory in chunks, from where
        all others copy it; else MPI_Bcast.
    """
    group = group_or_world(group)
    check_output("broadcast", tensor)
    root = group.group_rank("broadcast", "src", src)
    operation = operation_on("broadcast", tensor, root=root)
    if (direct := direct_of(group, operation, tensor)) is not None:
        return direct.broadcast(operation, tensor, root, async_op)
    if (plane := shm_transport(group, "broadcast", tensor.nbytes)) is not None:
        steps = _on_node(plane, tensor, root)
        return run_in_steps(group, plane, operation, steps, tensors=[tensor], async_op=async_op)

    def action() -> None:
        if group.rank == root:
            group.queue.wire.broadcast(readable(tensor), root)
        else:
            landing = StagedOutput(tensor, keep=False)
            group.queue.wire.broadcast(landing.flat, root)
            landing.settle()

    return run(group, operation, action, tensors=[tensor], async_op=async_op, like=tensor)


def _on_node(plane: ShmTransport, tensor: Tensor, root: int) -> Iterator[None]:
    if plane.rank == root:
        source = readable(tensor)
        yield from data_movement.broadcast(plane, [range_of(source)], root)
    else:
        landing = StagedOutput(tensor, keep=False)
        yield from data_movement.broadcast(plane, [range_of(landing.flat)], root)
        landing.settle()
