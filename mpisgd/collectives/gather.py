"""`gather` and `scatter`: from everyone to one rank, and from one rank to everyone."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import StagedOutput, apart, readable
from mpisgd.collectives.common import direct_of, operation_on, run, run_in_steps
from mpisgd.collectives.dispatch import shm_transport
from mpisgd.collectives.tensor_arguments import check_output, check_same, check_tensor, check_tensors
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.errors import InvalidArgument
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.shm import data_movement
from mpisgd.transport.shm.staging import range_of
from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["gather", "scatter"]


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy the tensor of the r-th rank into `gather_list[r]` of rank `dst`.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: same shape and dtype on every rank; unchanged.
        gather_list: on `dst`, `group.size` tensors of the size and dtype of `tensor`, overwritten; None on
            the others.
        dst: global rank of the one that gets them.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave all tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, ShapeMismatch, InvalidRank, InvalidArgument: found locally, before anything is
            sent.
        CollectiveMismatch: a rank gave another shape, dtype or dst; raised on every rank.

    Cost: on one host, through shared memory without any scratch; else MPI_Gather and `group.size *
        tensor.numel()` elements of scratch memory on `dst`.
    """
    group = group_or_world(group)
    check_tensor("gather", tensor)
    root = group.group_rank("gather", "dst", dst)
    outputs = _check_list("gather", "gather_list", gather_list, tensor, group, root, output=True)
    operation = operation_on("gather", tensor, root=root)
    if (direct := direct_of(group, operation, tensor)) is not None:
        return direct.gather(operation, outputs, tensor, root, async_op)
    if (plane := shm_transport(group, "gather", group.size * tensor.nbytes)) is not None:
        steps = _gather_on_node(plane, outputs, tensor, root)
        return run_in_steps(group, plane, operation, steps, tensors=outputs, async_op=async_op, like=tensor)

    def action() -> None:
        if group.rank != root:
            group.queue.wire.gather(None, readable(tensor), root)
            return
        gathered = torch.empty(group.size, tensor.numel(), dtype=tensor.dtype)
        group.queue.wire.gather(gathered, readable(tensor), root)
        for output, piece in zip(outputs, gathered, strict=True):
            StagedOutput(output, keep=False).settle(piece)

    return run(group, operation, action, tensors=outputs, async_op=async_op, like=tensor)


def _gather_on_node(
    plane: ShmTransport, outputs: Sequence[Tensor], tensor: Tensor, root: int
) -> Iterator[None]:
    landings = [StagedOutput(output, keep=False) for output in outputs]
    places = [landing.flat for landing in landings]
    mine = apart(readable(tensor), places, own=root)
    yield from data_movement.gather(plane, [range_of(place) for place in places], range_of(mine), root)
    for landing in landings:
        landing.settle()


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy `scatter_list[r]` of rank `src` into the tensor of the r-th rank.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: same shape and dtype on every rank; overwritten.
        scatter_list: on `src`, `group.size` tensors of the size and dtype of `tensor`, unchanged; None on
            the others.
        src: global rank of the one that has them.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave all tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, ShapeMismatch, InvalidRank, InvalidArgument: found locally, before anything is
            sent.
        CollectiveMismatch: a rank gave another shape, dtype or src; raised on every rank.

    Cost: on one host, through shared memory without any scratch; else MPI_Scatter and `group.size *
        tensor.numel()` elements of scratch memory on `src`.
    """
    group = group_or_world(group)
    check_output("scatter", tensor)
    root = group.group_rank("scatter", "src", src)
    inputs = _check_list("scatter", "scatter_list", scatter_list, tensor, group, root, output=False)
    operation = operation_on("scatter", tensor, root=root)
    if (direct := direct_of(group, operation, tensor)) is not None:
        return direct.scatter(operation, tensor, inputs, root, async_op)
    if (plane := shm_transport(group, "scatter", group.size * tensor.nbytes)) is not None:
        steps = _scatter_on_node(plane, tensor, inputs, root)
        return run_in_steps(group, plane, operation, steps, tensors=[tensor], async_op=async_op)

    def action() -> None:
        landing = StagedOutput(tensor, keep=False)
        source = torch.cat([readable(piece) for piece in inputs]) if group.rank == root else None
        group.queue.wire.scatter(landing.flat, source, root)
        landing.settle()

    return run(group, operation, action, tensors=[tensor], async_op=async_op, like=tensor)


def _scatter_on_node(
    plane: ShmTransport, tensor: Tensor, inputs: Sequence[Tensor], root: int
) -> Iterator[None]:
    landing, pieces = StagedOutput(tensor, keep=False), [readable(piece) for piece in inputs]
    places = [range_of(piece) for piece in pieces]
    yield from data_movement.scatter(plane, range_of(landing.flat), places, root)
    landing.settle()


def _check_list(
    name: str,
    what: str,
    tensors: Sequence[Tensor] | None,
    like: Tensor,
    group: Group,
    root: int,
    *,
    output: bool,
) -> list[Tensor]:
    """Return the list that only the root has, checked; an empty one elsewhere."""
    if group.rank != root:
        if tensors:
            raise InvalidArgument(
                f"{name}: {what} is for global rank {group.ranks[root]} only, pass None on rank "
                f"{group.ranks[group.rank]}"
            )
        return []
    if tensors is None:
        raise InvalidArgument(
            f"{name}: rank {group.ranks[root]} must pass {what}, a list of {group.size} tensors"
        )
    checked = check_tensors(name, tensors, what, count=group.size, output=output)
    for i, tensor in enumerate(checked):
        check_same(name, f"{what}[{i}]", tensor, like.numel(), like, "as `tensor`")
    return checked
