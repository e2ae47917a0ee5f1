"""`all_to_all`: every rank has something for every rank."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import clone_if_overlapping, cut_by
from mpisgd.arguments import as_index, shown
from mpisgd.collectives.dispatch import Call, Collective, device_kind, operation_on, run
from mpisgd.collectives.tensor_arguments import check_output, check_same, check_tensor, check_tensors
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import dtype_name
from mpisgd.errors import CollectiveMismatch, ShapeMismatch
from mpisgd.interfaces.host_transport import HostTransport, Steps
from mpisgd.job.lifecycle import group_or_world
from mpisgd.memory_ranges import equal_ranges, range_of
from mpisgd.transport.device.backend import DeviceBackend

__all__ = ["all_to_all", "all_to_all_single", "exchange_on_device"]


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
        CollectiveMismatch: a rank expects other sizes than another one sends; raised on every rank, before
            any tensor is sent.

    Cost: on one host through shared memory, after an all-gather of 2 * group.size integers; else sends every
        input but its own once, after MPI_Alltoall of an integer for each rank.
    """
    group = group_or_world(group)
    inputs = check_tensors("all_to_all", input_tensor_list, "input_tensor_list", count=group.size)
    outputs = check_tensors(
        "all_to_all", output_tensor_list, "output_tensor_list", count=group.size, output=True
    )
    for what, tensors in (("input_tensor_list", inputs), ("output_tensor_list", outputs)):
        for i, tensor in enumerate(tensors):
            check_same("all_to_all", f"{what}[{i}]", tensor, tensor.numel(), inputs[0], "one dtype for all")

    operation = Operation("all_to_all", dtype=dtype_name(inputs[0].dtype), device=device_kind(inputs[0]))
    sizes = [output.numel() for output in outputs], [tensor.numel() for tensor in inputs]
    return run(ALL_TO_ALL_OF_ANY_SIZES, Call(group, operation, outputs, inputs, sizes=sizes), async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send piece r of `input`, cut along dimension 0, to rank r; join the received pieces in rank order.

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
        CollectiveMismatch: a rank expects other sizes than another one sends; raised on every rank, before
            any tensor is sent.

    Cost: on one host through shared memory, without sizes only where that is quicker (`tune`); else
        MPI_Alltoall, or with sizes pairwise messages after MPI_Alltoall of the sizes.
    """
    group = group_or_world(group)
    check_tensor("all_to_all_single", input, "input")
    check_output("all_to_all_single", output, "output")
    check_same("all_to_all_single", "output", output, output.numel(), input, "one dtype for both")
    if output_split_sizes is None and input_split_sizes is None:
        return _equal_parts(group, output, input, async_op)
    takes = _split_sizes(output, output_split_sizes, group.size, "output")
    gives = _split_sizes(input, input_split_sizes, group.size, "input")

    operation = Operation(
        "all_to_all_single",
        dtype=dtype_name(input.dtype),
        extra="with split sizes",
        device=device_kind(input),
    )
    call = Call(group, operation, [output], [input], sizes=(takes, gives))
    return run(ALL_TO_ALL_OF_ANY_SIZES, call, async_op)


def _equal_parts(group: Group, output: Tensor, tensor: Tensor, async_op: bool) -> Work | None:
    check_same("all_to_all_single", "output", output, tensor.numel(), tensor, "as `input`")
    parts = _split_sizes(tensor, None, group.size, "input")
    operation = operation_on("all_to_all_single", tensor)
    call = Call(group, operation, [output], [tensor], sizes=(parts, parts))
    return run(ALL_TO_ALL, call, async_op, tensor.nbytes)


def _split_sizes(tensor: Tensor, sizes: Sequence[int] | None, parts: int, what: str) -> list[int]:
    """Return the elements of each piece of `tensor` cut along dimension 0."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if sizes is None:
        if rows % parts:
            raise ShapeMismatch(
                f"all_to_all_single: {what} has {rows} rows, which {parts} ranks cannot share equally; pad "
                f"it or give {what}_split_sizes"
            )
        return [tensor.numel() // parts] * parts
    counts = _as_counts(sizes)
    if counts is None or len(counts) != parts or sum(counts) != rows:
        raise ShapeMismatch(
            f"all_to_all_single: {what}_split_sizes={shown(sizes)}; expected {parts} sizes that add up to "
            f"{rows}, the rows of {what}"
        )
    return [size * (tensor.numel() // rows if rows else 0) for size in counts]


def _as_counts(sizes: Any) -> list[int] | None:
    """Return sizes as ints, of numpy and torch too; None where one of them is no number of rows."""
    try:
        counts = [as_index(size) for size in sizes]
    except TypeError:
        return None
    return counts if all(count >= 0 for count in counts) else None


# -- equal parts ----------------------------------------------------------------------------------------


def _flats(call: Call) -> tuple[Tensor, Tensor]:
    """Return where everything arrives, and what is sent, apart from it."""
    out = call.write(call.outputs[0])
    return out, clone_if_overlapping(call.read(call.inputs[0]), [out])


def _mpi(call: Call) -> None:
    call.communicator.all_to_all(*_flats(call))


def _steps(call: Call, transport: HostTransport) -> Steps:
    out, source = _flats(call)
    yield from transport.all_to_all_equal(range_of(out), range_of(source))


def _device(call: Call, backend: DeviceBackend) -> Callable[[], Any]:
    assert call.sizes is not None
    return exchange_on_device(call, backend, *call.sizes)


ALL_TO_ALL = Collective("all_to_all", _mpi, _steps, device=_device, tuned=True)


# -- parts of any sizes, in one tensor or in several ----------------------------------------------------


def _pieces(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """Return where what comes from each rank goes, and what goes to each."""
    outs = [call.write(output) for output in call.outputs]
    sources = [clone_if_overlapping(call.read(tensor), outs) for tensor in call.inputs]
    if call.sizes is None or len(outs) == call.group.size:
        return outs, sources
    takes, gives = call.sizes
    return cut_by(outs[0], takes), cut_by(sources[0], gives)


def _exchange(call: Call) -> None:
    outs, sources = _pieces(call)
    _compare_sizes(call)
    me = call.group.rank
    outs[me].copy_(sources[me])
    others = [rank for rank in range(call.group.size) if rank != me]
    call.link.transfer(
        sends=[(rank, sources[rank]) for rank in others],
        receives=[(rank, outs[rank]) for rank in others],
    )


def _exchange_in_steps(call: Call, transport: HostTransport) -> Steps:
    outs, sources = _pieces(call)
    everyone, mine = _sizes(call)
    yield from transport.all_gather(equal_ranges(everyone, call.group.size), range_of(mine))
    _check_matrix(call, everyone)
    sizes = (everyone[:, 0] * sources[0].element_size()).tolist()
    takes, gives = [range_of(piece) for piece in outs], [range_of(piece) for piece in sources]
    yield from transport.all_to_all(takes, gives, sizes)


def _exchange_on_device(call: Call, backend: DeviceBackend) -> Callable[[], Any]:
    sizes = call.operation._replace(extra="sizes")
    call.group.queue.run(sizes, lambda: _compare_sizes(call))  # NCCL would wait for ever
    return _device(call, backend)


def exchange_on_device(
    call: Call, backend: DeviceBackend, takes: Sequence[int], gives: Sequence[int]
) -> Callable[[], Any]:
    """Return a function that begins to exchange consecutive parts of the inputs with those of all ranks.

    Args:
        call: a root's collective has no outputs or no inputs on the other ranks.
        backend: what does it.
        takes: elements that come from each rank.
        gives: elements that go to each.
    """
    like = (call.outputs or call.inputs)[0]
    out = call.write_as_one(call.outputs) if call.outputs else like.new_empty(0)
    source = call.read_as_one(call.inputs) if call.inputs else like.new_empty(0)
    source = clone_if_overlapping(source, [out])
    return lambda: backend.all_to_all(out, source, takes, gives)


def _sizes(call: Call) -> tuple[Tensor, Tensor]:
    """Return room for everyone's sizes, [size, 2, size], and this rank's: what it gives, what it takes."""
    assert call.sizes is not None
    takes, gives = call.sizes
    everyone = torch.empty(call.group.size, 2, call.group.size, dtype=torch.int64)
    return everyone, torch.tensor([list(gives), list(takes)])


def _compare_sizes(call: Call) -> None:
    """Raise, on all ranks, if what one sends is not what another expects; runs inside the queue.

    Each rank compares what the others are about to send to it. Cost: an all-to-all of one number for each
    rank, and an all-reduce of one.
    """
    assert call.sizes is not None
    group, (takes, gives) = call.group, call.sizes
    sent, expected = torch.empty(group.size, dtype=torch.int64), torch.tensor(list(takes))
    call.communicator.all_to_all(sent, torch.tensor(list(gives)))
    wrong = (sent != expected).nonzero().flatten()
    # The sender counts before the receiver, as in `_check_matrix`.
    none = group.size**2
    first = torch.tensor([int(wrong[0]) * group.size + group.rank if len(wrong) else none])
    call.communicator.all_reduce(first, "MIN")
    if int(first) < none:
        src, dst = divmod(int(first), group.size)
        pair = torch.tensor([int(sent[src]), int(expected[src])])
        call.communicator.broadcast(pair, dst)
        raise _mismatch(call, src, dst, *pair.tolist())


def _check_matrix(call: Call, everyone: Tensor) -> None:
    """Raise, on all ranks, if what one sends is not what another expects; `everyone` as in `_sizes`."""
    sent, expected = everyone[:, 0], everyone[:, 1].T
    wrong = (sent != expected).nonzero()
    if len(wrong):
        src, dst = wrong[0].tolist()
        raise _mismatch(call, src, dst, int(sent[src, dst]), int(expected[src, dst]))


def _mismatch(call: Call, src: int, dst: int, sent: int, expected: int) -> CollectiveMismatch:
    ranks = call.group.ranks
    return CollectiveMismatch(
        f"{call.operation.kind}: rank {ranks[src]} sends {sent} elements to rank {ranks[dst]}, "
        f"which expects {expected}"
    )


ALL_TO_ALL_OF_ANY_SIZES = Collective("all_to_all", _exchange, _exchange_in_steps, device=_exchange_on_device)
