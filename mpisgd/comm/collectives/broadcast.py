"""`broadcast`: one rank's tensor becomes everyone's."""

from collections.abc import Iterator

from torch import Tensor

from mpisgd.comm.buffers import Landing, check_output, readable
from mpisgd.comm.collectives.choice import node_plane
from mpisgd.comm.collectives.common import direct_of, operation_on, run, run_in_steps
from mpisgd.comm.group import Group
from mpisgd.comm.job import group_or_world
from mpisgd.comm.node import movement
from mpisgd.comm.node.plane import NodePlane
from mpisgd.comm.node.streams import place_of
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

    Cost: on one host, where that is quicker (`tune`), root copies it into shared memory in chunks, from where
        all others copy it; else MPI_Bcast.
    """
    group = group_or_world(group)
    check_output("broadcast", tensor)
    root = group.group_rank("broadcast", "src", src)
    operation = operation_on("broadcast", tensor, root=root)
    if (direct := direct_of(group, operation, tensor)) is not None:
        return direct.broadcast(operation, tensor, root, async_op)
    if (plane := node_plane(group, "broadcast", tensor.nbytes)) is not None:
        steps = _on_node(plane, tensor, root)
        return run_in_steps(group, plane, operation, steps, tensors=[tensor], async_op=async_op)

    def action() -> None:
        if group.rank == root:
            group.lane.wire.broadcast(readable(tensor), root)
        else:
            landing = Landing(tensor, keep=False)
            group.lane.wire.broadcast(landing.flat, root)
            landing.settle()

    return run(group, operation, action, tensors=[tensor], async_op=async_op, like=tensor)


def _on_node(plane: NodePlane, tensor: Tensor, root: int) -> Iterator[None]:
    if plane.rank == root:
        source = readable(tensor)
        yield from movement.broadcast(plane, [place_of(source)], root)
    else:
        landing = Landing(tensor, keep=False)
        yield from movement.broadcast(plane, [place_of(landing.flat)], root)
        landing.settle()
