"""`all_to_all`: every rank has something for every rank."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import StagedOutput, apart, cut_by, readable
from mpisgd.arguments import shown
from mpisgd.collectives.common import (
    device_word,
    direct_of,
    link_of,
    operation_on,
    run,
    run_in_steps,
)
from mpisgd.collectives.dispatch import shm_transport
from mpisgd.collectives.tensor_arguments import check_output, check_same, check_tensor, check_tensors
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import dtype_name
from mpisgd.errors import CollectiveMismatch, ShapeMismatch
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.shm import data_movement
from mpisgd.transport.shm.staging import equal_ranges, range_of
from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["all_to_all", "all_to_all_single"]


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy `input_tensor_list[r]` into `output_tensor_list[this rank]` of the r-th rank.

    Collective: all ranks of `group` call it in the same order.

    Args:
        output_tensor_list: one tensor per rank, of the sizes that the others send; overwritten. They may
            overlap the inputs.
        input_tensor_list: one tensor per rank, any sizes, one dtype; unchanged.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave all tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: what a rank sends is not what another expects; raised on every rank, before any
            tensor travels.

    Cost: after an all-gather of 2 * group.size integers, goes through shared memory on one host; else sends
        every input but its own once.
    """
    group = group_or_world(group)
    inputs = check_tensors("all_to_all", input_tensor_list, "input_tensor_list", count=group.size)
    outputs = check_tensors(
        "all_to_all", output_tensor_list, "output_tensor_list", count=group.size, output=True
    )
    for what, tensors in (("input_tensor_list", inputs), ("output_tensor_list", outputs)):
        for i, tensor in enumerate(tensors):
            check_same("all_to_all", f"{what}[{i}]", tensor, tensor.numel(), inputs[0], "one dtype for all")

    def action() -> None:
        landings = [StagedOutput(output, keep=False) for output in outputs]
        places = [landing.flat for landing in landings]
        _deal(group, "all_to_all", places, [apart(readable(tensor), places) for tensor in inputs])
        for landing in landings:
            landing.settle()

    operation = Operation("all_to_all", dtype=dtype_name(inputs[0].dtype), device=device_word(inputs[0]))
    if (direct := direct_of(group, operation, inputs[0])) is not None:
        _agree_on_sizes(group, operation, [o.numel() for o in outputs], [t.numel() for t in inputs])
        return direct.all_to_all(operation, outputs, inputs, async_op)
    if (plane := shm_transport(group, "all_to_all_of_any_sizes")) is not None:
        steps = _lists_on_node(group, plane, outputs, inputs)
        return run_in_steps(group, plane, operation, steps, tensors=outputs, async_op=async_op)
    return run(group, operation, action, tensors=outputs, async_op=async_op, like=inputs[0])


def _lists_on_node(
    group: Group, plane: ShmTransport, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Iterator[None]:
    landings = [StagedOutput(output, keep=False) for output in outputs]
    places = [landing.flat for landing in landings]
    yield from _deal_on_node(
        group, plane, "all_to_all", places, [apart(readable(tensor), places) for tensor in inputs]
    )
    for landing in landings:
        landing.settle()


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Cut `input` along dimension 0, hand piece r to the r-th rank, and join what comes in rank order.

    Collective: all ranks of `group` call it in the same order.

    Args:
        output: [sum(output_split_sizes), ...]; overwritten. It may overlap `input`.
        input: [sum(input_split_sizes), ...], same dtype as `output`; unchanged.
        output_split_sizes: rows that come from each rank; None: equal parts.
        input_split_sizes: rows that go to each rank; None: equal parts. All ranks give sizes, or none does.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave both tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: what a rank sends is not what another expects; raised on every rank, before any
            tensor travels.

    Cost: on one host through shared memory, without sizes only where that is quicker (`tune`); else
        MPI_Alltoall, or with sizes pairwise messages after an all-gather of the sizes.
    """
    group = group_or_world(group)
    check_tensor("all_to_all_single", input, "input")
    check_output("all_to_all_single", output, "output")
    check_same("all_to_all_single", "output", output, output.numel(), input, "one dtype for both")
    if output_split_sizes is None and input_split_sizes is None:
        return _equal_parts(group, output, input, async_op)
    takes = _split_sizes(output, output_split_sizes, group.size, "output")
    gives = _split_sizes(input, input_split_sizes, group.size, "input")

    def action() -> None:
        landing = StagedOutput(output, keep=False)
        source = apart(readable(input), [landing.flat])
        _deal(group, "all_to_all_single", cut_by(landing.flat, takes), cut_by(source, gives))
        landing.settle()

    operation = Operation(
        "all_to_all_single",
        dtype=dtype_name(input.dtype),
        extra="with split sizes",
        device=device_word(input),
    )
    if (direct := direct_of(group, operation, input)) is not None:
        _agree_on_sizes(group, operation, takes, gives)
        return direct.all_to_all_single(operation, output, input, takes, gives, async_op)
    if (plane := shm_transport(group, "all_to_all_of_any_sizes")) is not None:
        steps = _split_on_node(group, plane, output, input, takes, gives)
        return run_in_steps(group, plane, operation, steps, tensors=[output], async_op=async_op)
    return run(group, operation, action, tensors=[output], async_op=async_op, like=output)


def _split_on_node(
    group: Group, plane: ShmTransport, output: Tensor, tensor: Tensor, takes: list[int], gives: list[int]
) -> Iterator[None]:
    landing = StagedOutput(output, keep=False)
    source = apart(readable(tensor), [landing.flat])
    yield from _deal_on_node(
        group, plane, "all_to_all_single", cut_by(landing.flat, takes), cut_by(source, gives)
    )
    landing.settle()


def _equal_parts(group: Group, output: Tensor, tensor: Tensor, async_op: bool) -> Work | None:
    check_same("all_to_all_single", "output", output, tensor.numel(), tensor, "as `input`")
    parts = _split_sizes(tensor, None, group.size, "input")
    operation = operation_on("all_to_all_single", tensor)
    if (direct := direct_of(group, operation, tensor)) is not None:
        return direct.all_to_all_single(operation, output, tensor, parts, parts, async_op)
    if (plane := shm_transport(group, "all_to_all", tensor.nbytes)) is not None:
        steps = _equal_parts_on_node(plane, output, tensor)
        return run_in_steps(group, plane, operation, steps, tensors=[output], async_op=async_op)

    def action() -> None:
        landing = StagedOutput(output, keep=False)
        source = apart(readable(tensor), [landing.flat])
        group.queue.wire.all_to_all(landing.flat, source)
        landing.settle()

    return run(group, operation, action, tensors=[output], async_op=async_op, like=output)


def _equal_parts_on_node(plane: ShmTransport, output: Tensor, tensor: Tensor) -> Iterator[None]:
    landing = StagedOutput(output, keep=False)
    source = apart(readable(tensor), [landing.flat])
    yield from data_movement.all_to_all_equal(plane, range_of(landing.flat), range_of(source))
    landing.settle()


def _split_sizes(tensor: Tensor, sizes: Sequence[int] | None, parts: int, what: str) -> list[int]:
    """Return the elements of each piece of `tensor` cut along dimension 0."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if sizes is None:
        if rows % parts:
            raise ShapeMismatch(
                f"all_to_all_single: {what} has {rows} rows, which {parts} ranks cannot share equally; pad "
                f"it or give {what}_split_sizes"
            )
        sizes = [rows // parts] * parts
    if not _are_counts(sizes) or len(sizes) != parts or sum(sizes) != rows:
        raise ShapeMismatch(
            f"all_to_all_single: {what}_split_sizes={shown(sizes)}; expected {parts} sizes that add up to "
            f"{rows}, the rows of {what}"
        )
    return [size * (tensor.numel() // rows if rows else 0) for size in sizes]


def _are_counts(sizes: object) -> bool:
    listed = isinstance(sizes, Sequence) and not isinstance(sizes, (str, bytes))
    return listed and all(isinstance(size, int) and size >= 0 for size in sizes)  # type: ignore[attr-defined]


def _agree_on_sizes(group: Group, operation: Operation, takes: Sequence[int], gives: Sequence[int]) -> None:
    """Compare what the ranks send with what others expect, where the tensors go another way. Collective."""
    sizes = operation._replace(extra="sizes")
    group.queue.run(sizes, lambda: _compare_sizes(group, operation.kind, takes, gives))


def _compare_sizes(group: Group, name: str, takes: Sequence[int], gives: Sequence[int]) -> None:
    """Raise, on all ranks, if what one sends is not what another expects; runs inside the queue."""
    everyone = torch.empty(group.size, 2, group.size, dtype=torch.int64)
    mine = torch.tensor([list(gives), list(takes)])
    group.queue.wire.all_gather(everyone.view(-1), mine.view(-1))
    _check_matrix(group, name, everyone)


def _deal(group: Group, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Send every piece its way; runs inside the queue."""
    _compare_sizes(group, name, [piece.numel() for piece in outputs], [piece.numel() for piece in inputs])
    outputs[group.rank].copy_(inputs[group.rank])
    others = [rank for rank in range(group.size) if rank != group.rank]
    link_of(group, name).transfer(
        sends=[(rank, inputs[rank]) for rank in others],
        receives=[(rank, outputs[rank]) for rank in others],
    )


def _deal_on_node(
    group: Group, plane: ShmTransport, name: str, outputs: list[Tensor], inputs: list[Tensor]
) -> Iterator[None]:
    """Bring every piece its way through the staging memory."""
    everyone = torch.empty(group.size, 2, group.size, dtype=torch.int64)
    mine = torch.tensor([[piece.numel() for piece in pieces] for pieces in (inputs, outputs)])
    yield from data_movement.all_gather(plane, equal_ranges(everyone, plane.size), range_of(mine))
    _check_matrix(group, name, everyone)
    sizes = (everyone[:, 0] * inputs[0].element_size()).tolist()
    takes, gives = [range_of(piece) for piece in outputs], [range_of(piece) for piece in inputs]
    yield from data_movement.all_to_all(plane, takes, gives, sizes)


def _check_matrix(group: Group, name: str, everyone: Tensor) -> None:
    """Raise, on all ranks, if what one sends is not what another expects.

    Args:
        group: of the operation.
        name: of the operation.
        everyone: [size, 2, size]; what each rank sends to each, and what it expects from each.
    """
    sent, expected = everyone[:, 0], everyone[:, 1].T
    wrong = (sent != expected).nonzero()
    if len(wrong):
        src, dst = wrong[0].tolist()
        raise CollectiveMismatch(
            f"{name}: rank {group.ranks[src]} sends {sent[src, dst]} elements to rank "
            f"{group.ranks[dst]}, which expects {expected[src, dst]}"
        )
