"""`all_gather`: everyone gets everyone's tensor, in a list or in one tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.comm.buffers import (
    Landing,
    check_output,
    check_same,
    check_tensor,
    check_tensors,
    overlap,
    readable,
)
from mpisgd.comm.collectives.common import operation_on
from mpisgd.comm.group import Group
from mpisgd.comm.job import group_or_world
from mpisgd.comm.work import Work

__all__ = ["all_gather", "all_gather_into_tensor", "check_gathered", "gather_flat"]


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

    Cost: `group.size * tensor.numel()` elements of scratch memory.
    """
    group = group_or_world(group)
    check_tensor("all_gather", tensor)
    outputs = check_tensors("all_gather", tensor_list, "tensor_list", count=group.size, output=True)
    for i, output in enumerate(outputs):
        check_same("all_gather", f"tensor_list[{i}]", output, tensor.numel(), tensor, "as `tensor`")

    def action() -> None:
        gathered = torch.empty(group.size * tensor.numel(), dtype=tensor.dtype)
        group.lane.wire.all_gather(gathered, readable(tensor))
        for output, piece in zip(
            outputs, gathered.chunk(group.size) if gathered.numel() else (), strict=False
        ):
            output.detach().copy_(piece.view(output.shape))

    return group.lane.run(operation_on("all_gather", tensor), action, tensors=outputs, async_op=async_op)


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

    Source: MPI standard, MPI_Allgather.
    """
    group = group_or_world(group)
    check_gathered("all_gather_into_tensor", output_tensor, input_tensor, group.size)
    return group.lane.run(
        operation_on("all_gather_into_tensor", input_tensor),
        lambda: gather_flat(group, output_tensor, input_tensor),
        tensors=[output_tensor],
        async_op=async_op,
    )


def check_gathered(name: str, output: Tensor, tensor: Tensor, size: int) -> None:
    """Raise unless `output` has room for everyone's `tensor`."""
    check_tensor(name, tensor, "input_tensor")
    check_output(name, output, "output_tensor")
    check_same(
        name, "output_tensor", output, size * tensor.numel(), tensor, f"{size} ranks times input_tensor"
    )


def gather_flat(group: Group, output: Tensor, tensor: Tensor) -> None:
    """Gather everyone's `tensor` into `output`; runs inside the lane."""
    landing = Landing(output, keep=False)
    mine: Tensor | None = readable(tensor)
    assert mine is not None
    place = landing.flat[group.rank * mine.numel() : (group.rank + 1) * mine.numel()]
    if mine.data_ptr() == place.data_ptr():
        mine = None
    elif overlap(mine, landing.flat):
        mine = mine.clone()
    group.lane.wire.all_gather(landing.flat, mine)
    landing.settle()
