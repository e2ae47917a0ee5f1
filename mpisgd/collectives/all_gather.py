"""`all_gather`: everyone gets everyone's tensor, in a list or in one tensor."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import StagedOutput, apart, overlap, readable
from mpisgd.collectives.common import direct_of, operation_on, run, run_in_steps
from mpisgd.collectives.dispatch import shm_transport
from mpisgd.collectives.tensor_arguments import check_output, check_same, check_tensor, check_tensors
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.shm import data_movement
from mpisgd.transport.shm.staging import MemoryRange, equal_ranges, range_of
from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["all_gather", "all_gather_into_tensor", "check_gathered", "gather_flat", "gather_on_node"]


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Copy the tensor of the r-th rank into everyone's `tensor_list[r]`.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor_list: `group.size` tensors of the size and dtype of `tensor`; overwritten.
        tensor: same shape and dtype on every rank; unchanged.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave all tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: a rank gave another shape or dtype; raised on every rank. Pad the last batch, or
            use drop_last=True.

    Cost: on one host, through shared memory without any scratch; else MPI_Allgather and `group.size *
        tensor.numel()` elements of scratch memory.
    """
    group = group_or_world(group)
    check_tensor("all_gather", tensor)
    outputs = check_tensors("all_gather", tensor_list, "tensor_list", count=group.size, output=True)
    for i, output in enumerate(outputs):
        check_same("all_gather", f"tensor_list[{i}]", output, tensor.numel(), tensor, "as `tensor`")
    operation = operation_on("all_gather", tensor)
    if (direct := direct_of(group, operation, tensor)) is not None:
        return direct.all_gather(operation, outputs, tensor, async_op)
    if (plane := shm_transport(group, "all_gather_list", group.size * tensor.nbytes)) is not None:
        steps = _list_on_node(plane, outputs, tensor)
        return run_in_steps(group, plane, operation, steps, tensors=outputs, async_op=async_op)

    def action() -> None:
        gathered = torch.empty(group.size * tensor.numel(), dtype=tensor.dtype)
        group.queue.wire.all_gather(gathered, readable(tensor))
        for output, piece in zip(
            outputs, gathered.chunk(group.size) if gathered.numel() else (), strict=False
        ):
            StagedOutput(output, keep=False).settle(piece)

    return run(group, operation, action, tensors=outputs, async_op=async_op, like=tensor)


def _list_on_node(plane: ShmTransport, outputs: Sequence[Tensor], tensor: Tensor) -> Iterator[None]:
    landings = [StagedOutput(output, keep=False) for output in outputs]
    places = [landing.flat for landing in landings]
    mine = apart(readable(tensor), places, own=plane.rank)
    yield from data_movement.all_gather(plane, [range_of(place) for place in places], range_of(mine))
    for landing in landings:
        landing.settle()


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Put everyone's `input_tensor` into everyone's `output_tensor`, in rank order.

    Collective: all ranks of `group` call it in the same order.

    Args:
        output_tensor: `group.size` times the elements of `input_tensor`, same dtype: concatenated or
            stacked, the memory is the same; overwritten.
        input_tensor: same shape and dtype on every rank; unchanged. It may be this rank's slice of
            `output_tensor` (then nothing is copied), or overlap it in any other way (then it is copied).
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave both tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: a rank gave another shape or dtype; raised on every rank.

    Cost: on one host through shared memory where that is quicker (`tune`); else MPI_Allgather.
    """
    group = group_or_world(group)
    check_gathered("all_gather_into_tensor", output_tensor, input_tensor, group.size)
    operation = operation_on("all_gather_into_tensor", input_tensor)
    if (direct := direct_of(group, operation, input_tensor)) is not None:
        return direct.all_gather_into(operation, [(output_tensor, input_tensor)], async_op)
    if (plane := shm_transport(group, "all_gather", output_tensor.nbytes)) is not None:
        steps = gather_on_node(plane, output_tensor, input_tensor)
        return run_in_steps(group, plane, operation, steps, tensors=[output_tensor], async_op=async_op)
    return run(
        group,
        operation,
        lambda: gather_flat(group, output_tensor, input_tensor),
        tensors=[output_tensor],
        async_op=async_op,
        like=input_tensor,
    )


def check_gathered(name: str, output: Tensor, tensor: Tensor, size: int) -> None:
    """Raise unless `output` has room for everyone's `tensor`."""
    check_tensor(name, tensor, "input_tensor")
    check_output(name, output, "output_tensor")
    check_same(
        name, "output_tensor", output, size * tensor.numel(), tensor, f"{size} ranks times input_tensor"
    )


def gather_flat(group: Group, output: Tensor, tensor: Tensor) -> None:
    """Gather everyone's `tensor` into `output` by MPI; runs inside the queue."""
    landing = StagedOutput(output, keep=False)
    mine, places = _to_be_gathered(landing.flat, tensor, group)
    in_place = range_of(mine) == places[group.rank]
    group.queue.wire.all_gather(landing.flat, None if in_place else mine)
    landing.settle()


def gather_on_node(plane: ShmTransport, output: Tensor, tensor: Tensor) -> Iterator[None]:
    """Gather everyone's `tensor` into `output` through the staging memory."""
    landing = StagedOutput(output, keep=False)
    mine, places = _to_be_gathered(landing.flat, tensor, plane)
    yield from data_movement.all_gather(plane, places, range_of(mine))
    landing.settle()


def _to_be_gathered(
    flat: Tensor, tensor: Tensor, members: Group | ShmTransport
) -> tuple[Tensor, list[MemoryRange]]:
    """Return this rank's contiguous [n], which may lie in its own place in `flat`, and everyone's places."""
    mine, places = readable(tensor), equal_ranges(flat, members.size)
    if range_of(mine) != places[members.rank] and overlap(mine, flat):
        mine = mine.clone()
    return mine, places
