"""`gather` and `scatter`: from everyone to one rank, and from one rank to everyone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.comm.buffers import Landing, check_output, check_same, check_tensor, check_tensors, readable
from mpisgd.comm.collectives.common import operation_on
from mpisgd.comm.group import Group
from mpisgd.comm.job import group_or_world
from mpisgd.comm.work import Work
from mpisgd.errors import InvalidArgument

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

    Cost: `group.size * tensor.numel()` elements of scratch memory on `dst`.
    """
    group = group_or_world(group)
    check_tensor("gather", tensor)
    root = group.group_rank("gather", "dst", dst)
    outputs = _check_list("gather", "gather_list", gather_list, tensor, group, root, output=True)

    def action() -> None:
        if group.rank != root:
            group.lane.wire.gather(None, readable(tensor), root)
            return
        gathered = torch.empty(group.size, tensor.numel(), dtype=tensor.dtype)
        group.lane.wire.gather(gathered, readable(tensor), root)
        for output, piece in zip(outputs, gathered, strict=True):
            output.detach().copy_(piece.view(output.shape))

    return group.lane.run(
        operation_on("gather", tensor, root=root), action, tensors=outputs, async_op=async_op
    )


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

    Cost: `group.size * tensor.numel()` elements of scratch memory on `src`.
    """
    group = group_or_world(group)
    check_output("scatter", tensor)
    root = group.group_rank("scatter", "src", src)
    inputs = _check_list("scatter", "scatter_list", scatter_list, tensor, group, root, output=False)

    def action() -> None:
        landing = Landing(tensor, keep=False)
        source = torch.cat([readable(piece) for piece in inputs]) if group.rank == root else None
        group.lane.wire.scatter(landing.flat, source, root)
        landing.settle()

    return group.lane.run(
        operation_on("scatter", tensor, root=root), action, tensors=[tensor], async_op=async_op
    )


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
