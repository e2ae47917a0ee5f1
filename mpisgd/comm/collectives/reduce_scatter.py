"""`reduce_scatter`: everyone's tensors are combined, and every rank keeps its own part of the result."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.comm.algorithms.direct import reduce_own_part
from mpisgd.comm.buffers import (
    Landing,
    check_output,
    check_same,
    check_tensor,
    check_tensors,
    overlap,
    readable,
)
from mpisgd.comm.collectives.common import link_of, operation_on
from mpisgd.comm.dtypes import ReduceOp, check_op
from mpisgd.comm.group import Group
from mpisgd.comm.job import group_or_world
from mpisgd.comm.work import Work

__all__ = ["check_scattered", "reduce_own", "reduce_scatter", "reduce_scatter_tensor"]


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine everyone's `input_list[r]` into the `output` of the r-th rank.

    Collective: all ranks of `group` call it in the same order.

    Args:
        output: same shape and dtype on every rank; overwritten.
        input_list: `group.size` tensors of the size and dtype of `output`; unchanged.
        op: elementwise combination; AVG is SUM divided by `group.size`.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave all tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, UnsupportedOp, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.

    Cost: sends (group.size - 1) * output.numel() elements per rank; as much scratch memory.
    """
    group = group_or_world(group)
    check_output("reduce_scatter", output, "output")
    op = check_op("reduce_scatter", op, output.dtype)
    inputs = check_tensors("reduce_scatter", input_list, "input_list", count=group.size)
    for i, tensor in enumerate(inputs):
        check_same("reduce_scatter", f"input_list[{i}]", tensor, output.numel(), output, "as `output`")
    return group.lane.run(
        operation_on("reduce_scatter", output, op=op),
        lambda: reduce_own(group, output, [readable(tensor) for tensor in inputs], op),
        tensors=[output],
        async_op=async_op,
    )


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `input` over the group; this rank keeps slice `group.rank` of the result.

    Collective: all ranks of `group` call it in the same order.

    Args:
        output: [n] elements; overwritten. It may be a slice of `input`.
        input: [group.size * n] elements, same dtype as `output`; unchanged.
        op: elementwise combination; AVG is SUM divided by `group.size`.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave both tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, UnsupportedOp, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.

    Cost: sends (group.size - 1) * n elements per rank; as much scratch memory. The owner of a slice adds
        in rank order, so the result does not depend on timing.
    """
    group = group_or_world(group)
    op = check_scattered("reduce_scatter_tensor", output, input, op, group.size)
    return group.lane.run(
        operation_on("reduce_scatter_tensor", output, op=op),
        lambda: reduce_own(group, output, cut(input, group.size), op),
        tensors=[output],
        async_op=async_op,
    )


def check_scattered(name: str, output: Tensor, tensor: Tensor, op: ReduceOp, size: int) -> ReduceOp:
    """Raise unless `tensor` is one `output` per rank; return the op."""
    check_tensor(name, tensor, "input")
    check_output(name, output, "output")
    check_same(name, "input", tensor, size * output.numel(), output, f"{size} ranks times output")
    return check_op(name, op, output.dtype)


def cut(tensor: Tensor, parts: int) -> list[Tensor]:
    """Return `parts` equal contiguous pieces of a tensor's elements."""
    return list(readable(tensor).view(parts, -1) if tensor.numel() else readable(tensor).new_empty(parts, 0))


def reduce_own(group: Group, output: Tensor, parts: list[Tensor], op: ReduceOp) -> None:
    """Combine everyone's part of this rank into `output`; runs inside the lane."""
    landing = Landing(output, keep=False)
    if group.plane is None:
        landing.settle(reduce_own_part(link_of(group, "reduce_scatter"), parts, op))
        return
    apart = not any(overlap(landing.flat, part) for part in parts)
    result = landing.flat if apart else torch.empty_like(landing.flat)
    group.plane.reduce_scatter(parts, op, result)
    landing.settle(result)
