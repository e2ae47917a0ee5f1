"""`reduce_scatter`: everyone's tensors are combined, and every rank keeps its own part of the result."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import StagedOutput, overlap, readable
from mpisgd.collectives.algorithms.all_to_all import reduce_own_part
from mpisgd.collectives.common import direct_of, link_of, operation_on, run, run_in_steps
from mpisgd.collectives.dispatch import shm_transport
from mpisgd.collectives.tensor_arguments import check_output, check_same, check_tensor, check_tensors
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp, check_op
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.shm import reduction
from mpisgd.transport.shm.staging import equal_ranges, range_of
from mpisgd.transport.shm.transport import ShmTransport

__all__ = [
    "check_scattered",
    "cut",
    "own_part_on_node",
    "reduce_own",
    "reduce_scatter",
    "reduce_scatter_tensor",
]


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

    Cost: on one host, through shared memory; else sends (group.size - 1) * output.numel() elements per rank,
        with as much scratch memory.
    """
    group = group_or_world(group)
    check_output("reduce_scatter", output, "output")
    op = check_op("reduce_scatter", op, output.dtype)
    inputs = check_tensors("reduce_scatter", input_list, "input_list", count=group.size)
    for i, tensor in enumerate(inputs):
        check_same("reduce_scatter", f"input_list[{i}]", tensor, output.numel(), output, "as `output`")
    operation = operation_on("reduce_scatter", output, op=op)
    if (direct := direct_of(group, operation, output, op=op)) is not None:
        return direct.reduce_scatter(operation, output, inputs, op, async_op)
    if (plane := shm_transport(group, "reduce_scatter", group.size * output.nbytes)) is not None:
        steps = _list_on_node(plane, output, inputs, op)
        return run_in_steps(group, plane, operation, steps, tensors=[output], async_op=async_op)
    return run(
        group,
        operation,
        lambda: reduce_own(group, output, [readable(tensor) for tensor in inputs], op),
        tensors=[output],
        async_op=async_op,
        like=output,
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

    Cost: on one host, through shared memory; else sends (group.size - 1) * n elements per rank, with as much
        scratch memory. The owner of a slice adds in rank order, so the result does not depend on timing.
    """
    group = group_or_world(group)
    op = check_scattered("reduce_scatter_tensor", output, input, op, group.size)
    operation = operation_on("reduce_scatter_tensor", output, op=op)
    if (direct := direct_of(group, operation, output, op=op)) is not None:
        return direct.reduce_scatter_from(operation, [(output, input)], op, async_op)
    if (plane := shm_transport(group, "reduce_scatter", input.nbytes)) is not None:
        steps = own_part_on_node(plane, output, input, op)
        return run_in_steps(group, plane, operation, steps, tensors=[output], async_op=async_op)
    return run(
        group,
        operation,
        lambda: reduce_own(group, output, cut(input, group.size), op),
        tensors=[output],
        async_op=async_op,
        like=output,
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
    """Combine everyone's part of this rank into `output` by messages; runs inside the queue."""
    landing = StagedOutput(output, keep=False)
    landing.settle(reduce_own_part(link_of(group, "reduce_scatter"), parts, op))


def own_part_on_node(plane: ShmTransport, output: Tensor, tensor: Tensor, op: ReduceOp) -> Iterator[None]:
    """Combine everyone's piece of this rank of `tensor` into `output` through the staging memory."""
    landing, flat = StagedOutput(output, keep=False), readable(tensor)
    length = landing.flat.numel()
    own = flat[plane.rank * length : (plane.rank + 1) * length]
    result = torch.empty_like(own) if overlap(landing.flat, flat) else landing.flat
    yield from reduction.reduce_scatter(plane, equal_ranges(flat, plane.size), own, op, result)
    landing.settle(result)


def _list_on_node(
    plane: ShmTransport, output: Tensor, inputs: Sequence[Tensor], op: ReduceOp
) -> Iterator[None]:
    landing, parts = StagedOutput(output, keep=False), [readable(tensor) for tensor in inputs]
    own = parts[plane.rank]
    overlaps = any(overlap(landing.flat, part) for part in parts)
    result = torch.empty_like(own) if overlaps else landing.flat
    yield from reduction.reduce_scatter(plane, [range_of(part) for part in parts], own, op, result)
    landing.settle(result)
