"""`all_to_all`: every rank has something for every rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.comm.buffers import (
    Landing,
    check_output,
    check_same,
    check_tensor,
    check_tensors,
    cut_by,
    dtype_name,
    overlap,
    readable,
)
from mpisgd.comm.collectives.common import link_of, operation_on
from mpisgd.comm.group import Group
from mpisgd.comm.handshake import Operation
from mpisgd.comm.job import group_or_world
from mpisgd.comm.work import Work
from mpisgd.errors import CollectiveMismatch, ShapeMismatch

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

    Cost: sends every input but its own once, after an all-gather of 2 * group.size integers.
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
        landings = [Landing(output, keep=False) for output in outputs]
        places = [landing.flat for landing in landings]
        _deal(group, "all_to_all", places, [_apart(readable(tensor), places) for tensor in inputs])
        for landing in landings:
            landing.settle()

    operation = Operation("all_to_all", dtype=dtype_name(inputs[0].dtype))
    return group.lane.run(operation, action, tensors=outputs, async_op=async_op)


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

    Source: MPI standard, MPI_Alltoall; with sizes, pairwise messages after an all-gather of the sizes.
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
        landing = Landing(output, keep=False)
        source = _apart(readable(input), [landing.flat])
        _deal(group, "all_to_all_single", cut_by(landing.flat, takes), cut_by(source, gives))
        landing.settle()

    operation = Operation("all_to_all_single", dtype=dtype_name(input.dtype), extra="with split sizes")
    return group.lane.run(operation, action, tensors=[output], async_op=async_op)


def _equal_parts(group: Group, output: Tensor, tensor: Tensor, async_op: bool) -> Work | None:
    check_same("all_to_all_single", "output", output, tensor.numel(), tensor, "as `input`")
    _split_sizes(tensor, None, group.size, "input")

    def action() -> None:
        landing = Landing(output, keep=False)
        source = _apart(readable(tensor), [landing.flat])
        group.lane.wire.all_to_all(landing.flat, source)
        landing.settle()

    return group.lane.run(
        operation_on("all_to_all_single", tensor), action, tensors=[output], async_op=async_op
    )


def _apart(source: Tensor, places: list[Tensor]) -> Tensor:
    """Return `source`, copied if results will arrive in its memory."""
    return source.clone() if any(overlap(source, place) for place in places) else source


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
    if len(sizes) != parts or sum(sizes) != rows or min(sizes) < 0:
        raise ShapeMismatch(
            f"all_to_all_single: {what}_split_sizes={list(sizes)}; expected {parts} sizes that add up to "
            f"{rows}, the rows of {what}"
        )
    return [size * (tensor.numel() // rows if rows else 0) for size in sizes]


def _deal(group: Group, name: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Send every piece its way; runs inside the lane."""
    _check_matrix(group, name, [piece.numel() for piece in inputs], [piece.numel() for piece in outputs])
    outputs[group.rank].copy_(inputs[group.rank])
    others = [rank for rank in range(group.size) if rank != group.rank]
    link_of(group, name).transfer(
        sends=[(rank, inputs[rank]) for rank in others],
        receives=[(rank, outputs[rank]) for rank in others],
    )


def _check_matrix(group: Group, name: str, gives: list[int], takes: list[int]) -> None:
    """Let every rank see everyone's sizes, so that all of them raise if two do not fit."""
    everyone = torch.empty(group.size, 2, group.size, dtype=torch.int64)
    group.lane.wire.all_gather(everyone.view(-1), torch.tensor([gives, takes]).view(-1))
    sent, expected = everyone[:, 0], everyone[:, 1].T
    wrong = (sent != expected).nonzero()
    if len(wrong):
        src, dst = wrong[0].tolist()
        raise CollectiveMismatch(
            f"{name} (group '{group.name}'): rank {group.ranks[src]} sends {sent[src, dst]} elements to rank "
            f"{group.ranks[dst]}, which expects {expected[src, dst]}"
        )
