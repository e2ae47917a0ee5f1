"""`gather` and `scatter`: from everyone to one rank, and from one rank to everyone."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mpisgd.accelerator.buffers import clone_if_overlapping
from mpisgd.collectives.all_to_all import exchange_on_device
from mpisgd.collectives.dispatch import Call, Collective, operation_on, run
from mpisgd.collectives.tensor_arguments import check_output, check_same, check_tensor, check_tensors
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.errors import InvalidArgument
from mpisgd.interfaces.host_transport import HostTransport, Steps
from mpisgd.job.lifecycle import group_or_world
from mpisgd.memory_ranges import range_of
from mpisgd.transport.device.backend import DeviceBackend

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
    call = Call(group, operation_on("gather", tensor, root=root), outputs, [tensor])
    return run(GATHER, call, async_op)


def _gather_by_mpi(call: Call) -> None:
    mine = call.read(call.inputs[0])
    out = call.write_as_one(call.outputs) if call.is_root else None
    call.communicator.gather(out, mine if out is None else clone_if_overlapping(mine, [out]), call.root)


def _gather_in_steps(call: Call, transport: HostTransport) -> Steps:
    flats = [call.write(output) for output in call.outputs]
    mine = clone_if_overlapping(call.read(call.inputs[0]), flats, own=call.root)
    yield from transport.gather([range_of(flat) for flat in flats], range_of(mine), call.root)


def _gather_on_device(call: Call, backend: DeviceBackend) -> Callable[[], Any]:
    return exchange_on_device(call, backend, *_takes_and_gives(call, call.inputs[0].numel(), call.is_root))


def _takes_and_gives(call: Call, numel: int, takes: bool) -> tuple[list[int], list[int]]:
    """Return the elements that this rank sends to each and receives from each; the root `takes` from all."""
    with_all = [numel if takes else 0] * call.group.size
    with_root = [numel if rank == call.root else 0 for rank in range(call.group.size)]
    return with_all, with_root


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Copy `scatter_list[r]` of rank `src` into `tensor` of the r-th rank.

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
    call = Call(group, operation_on("scatter", tensor, root=root), [tensor], inputs)
    return run(SCATTER, call, async_op)


def _scatter_by_mpi(call: Call) -> None:
    out = call.write(call.outputs[0])
    source = clone_if_overlapping(call.read_as_one(call.inputs), [out]) if call.is_root else None
    call.communicator.scatter(out, source, call.root)


def _scatter_in_steps(call: Call, transport: HostTransport) -> Steps:
    out, pieces = call.write(call.outputs[0]), [call.read(piece) for piece in call.inputs]
    yield from transport.scatter(range_of(out), [range_of(piece) for piece in pieces], call.root)


def _scatter_on_device(call: Call, backend: DeviceBackend) -> Callable[[], Any]:
    gives, takes = _takes_and_gives(call, call.outputs[0].numel(), call.is_root)
    return exchange_on_device(call, backend, takes, gives)


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


GATHER = Collective("gather", _gather_by_mpi, _gather_in_steps, device=_gather_on_device)
SCATTER = Collective("scatter", _scatter_by_mpi, _scatter_in_steps, device=_scatter_on_device)
