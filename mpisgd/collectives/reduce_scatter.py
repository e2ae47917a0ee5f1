"""`reduce_scatter`: everyone's tensors are combined, and every rank keeps its own part of the result."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import as_one, clone_if_overlapping, cut_by, overlap
from mpisgd.collectives.algorithms.all_to_all import reduce_own_part
from mpisgd.collectives.dispatch import Call, Collective, operation_on, run
from mpisgd.collectives.packing import put
from mpisgd.collectives.tensor_arguments import check_output, check_same, check_tensor, check_tensors
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp, check_op
from mpisgd.interfaces.host_transport import HostTransport, Steps
from mpisgd.job.lifecycle import group_or_world
from mpisgd.memory_ranges import equal_ranges, range_of
from mpisgd.transport.device.backend import DeviceBackend
from mpisgd.transport.torch_reduction import combine_in_rank_order

__all__ = ["REDUCE_SCATTER", "check_scattered", "reduce_scatter", "reduce_scatter_tensor"]

# Up to this size of a part MPI's all-to-all takes a logarithmic number of messages; of larger ones it, too,
# sends one to each rank, in which the parts need not be copied together.
SMALL_PART_BYTES = 4096


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `input_list[r]` of all ranks into `output` of the r-th rank.

    Collective: all ranks of `group` call it in the same order.

    Args:
        output: same shape and dtype on every rank; overwritten.
        input_list: `group.size` tensors of the size and dtype of `output`; unchanged.
        op: elementwise combination, or its name ("avg"); AVG is SUM divided by `group.size`.
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
    return run(
        REDUCE_SCATTER,
        Call(group, operation_on("reduce_scatter", output, op=op), [output], inputs, op=op),
        async_op,
    )


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `input` over the group; this rank keeps slice `group.rank` of the result.

    Collective: all ranks of `group` call it in the same order.

    Args:
        output: [n] elements; overwritten. It may be a slice of `input`.
        input: [group.size * n] elements, same dtype as `output`; unchanged.
        op: elementwise combination, or its name ("avg"); AVG is SUM divided by `group.size`.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave both tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, UnsupportedOp, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.

    Cost: on one host, through shared memory; else sends (group.size - 1) * n elements per rank, with as much
        scratch memory; slices up to 4 KiB by MPI_Alltoall, others in group.size - 1 messages. The owner of a
        slice adds in rank order, so the result does not depend on timing.
    """
    group = group_or_world(group)
    op = check_scattered("reduce_scatter_tensor", output, input, op, group.size)
    operation = operation_on("reduce_scatter_tensor", output, op=op)
    return run(REDUCE_SCATTER, Call(group, operation, [output], [input], op=op), async_op)


def check_scattered(name: str, output: Tensor, tensor: Tensor, op: ReduceOp | str, size: int) -> ReduceOp:
    """Raise unless `tensor` is one `output` per rank; return the op."""
    check_tensor(name, tensor, "input")
    check_output(name, output, "output")
    check_same(name, "input", tensor, size * output.numel(), output, f"{size} ranks times output")
    return check_op(name, op, output.dtype)


def _flats(call: Call) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield where each result goes, and what is combined: one part per rank, or all of them as one tensor."""
    each = len(call.inputs) // max(1, len(call.outputs))
    for i, output in enumerate(call.outputs):
        inputs = call.inputs[i * each : (i + 1) * each]
        yield call.write(output), [call.read(tensor) for tensor in inputs]


def _parts(flats: list[Tensor], size: int) -> list[Tensor]:
    """Return one contiguous part per rank."""
    return flats if len(flats) == size else cut_by(flats[0], [flats[0].numel() // size] * size)


def _mpi(call: Call) -> None:
    for out, flats in _flats(call):
        put(_own_part(call, flats), out)


def _own_part(call: Call, flats: list[Tensor]) -> Tensor:
    """Return the combination of everyone's part for this rank, added in rank order."""
    size = call.group.size
    parts = _parts(flats, size)
    if parts[0].nbytes > SMALL_PART_BYTES:
        return reduce_own_part(call.link, parts, call.op)
    source = as_one(flats)
    pieces = torch.empty_like(source)
    call.communicator.all_to_all(pieces, source)
    return combine_in_rank_order(cut_by(pieces, [parts[0].numel()] * size), call.op)


def _steps(call: Call, transport: HostTransport) -> Steps:
    rank, size = call.group.rank, call.group.size
    for out, flats in _flats(call):
        if len(flats) == size:
            own, places = flats[rank], [range_of(flat) for flat in flats]
        else:
            length = out.numel()
            own, places = flats[0][rank * length : (rank + 1) * length], equal_ranges(flats[0], size)
        result = torch.empty_like(own) if True in [overlap(out, flat) for flat in flats] else out
        yield from transport.reduce_scatter(places, own, call.op, result)
        put(result, out)


def _device(call: Call, backend: DeviceBackend) -> Callable[[], Any]:
    pairs = [(out, clone_if_overlapping(as_one(flats), [out])) for out, flats in _flats(call)]
    return lambda: [backend.reduce_scatter(out, flat, call.op) for out, flat in pairs]


REDUCE_SCATTER = Collective("reduce_scatter", _mpi, _steps, device=_device)
