"""`broadcast`: one rank's tensor becomes everyone's."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from mpisgd.collectives.dispatch import (
    Call,
    Collective,
    KnownCall,
    known_transfer,
    operation_on,
    remember,
    run,
    run_at_once,
)
from mpisgd.collectives.packing import messages_of
from mpisgd.collectives.tensor_arguments import check_output, lies_in_order
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.interfaces.host_transport import HostTransport, Steps
from mpisgd.job.lifecycle import group_or_world
from mpisgd.memory_ranges import range_of
from mpisgd.transport.device.backend import DeviceBackend

__all__ = ["BROADCAST", "broadcast"]


def broadcast(tensor: Tensor, src: int, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Copy the tensor of rank `src` to all ranks.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: same shape and dtype on every rank; unchanged on `src`, overwritten elsewhere.
        src: global rank of the one that has the values.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensor alone until its `wait()`.

    Raises:
        UnsupportedTensor, InvalidRank: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.

    Cost: on one host, `src` copies it in chunks into shared memory, and the others copy it from there, if
        that is faster (`tune`); else MPI_Bcast.
    """
    group = group_or_world(group)
    if not lies_in_order(tensor):
        check_output("broadcast", tensor)
    elif type(src) is int:
        key = ("broadcast", tensor.shape, tensor.dtype, src)
        if (known := group.known_calls.get(key)) is None:
            remember(group, key, known := _check_call(group, tensor, src))
        outputs = [] if group.rank == known.operation.root else [tensor]
        if async_op is False and not tensor.is_inference() and known.run_again(tensor):
            increment_version(outputs)
            return None
        if known.at_once is not None:
            inputs = [] if outputs else [tensor]
            return run_at_once(group, known, tensor, outputs=outputs, inputs=inputs, async_op=async_op)
    root = group.group_rank("broadcast", "src", src)
    call = Call(group, operation_on("broadcast", tensor, root=root), [tensor])
    return run(BROADCAST, call, async_op, tensor.nbytes)


def _check_call(group: Group, tensor: Tensor, src: int) -> KnownCall:
    """Return what is known of calls on tensors of the CPU that lie in order."""
    root, nbytes = group.group_rank("broadcast", "src", src), tensor.nbytes
    operation = operation_on("broadcast", tensor, root=root)
    return known_transfer(
        group, BROADCAST, operation, nbytes, lambda transport: transport.broadcast_at_once(nbytes, root)
    )


def _mpi(call: Call) -> None:
    for flat in _messages(call):
        call.communicator.broadcast(flat, call.root)


def _steps(call: Call, transport: HostTransport) -> Steps:
    root = call.root
    bring = call.read if call.is_root else call.write
    flats = [bring(tensor) for tensor in call.outputs]
    yield from transport.broadcast([range_of(flat) for flat in flats], root)


def _device(call: Call, backend: DeviceBackend) -> Callable[[], Any]:
    flats = list(_messages(call))
    return lambda: [backend.broadcast(flat, call.root) for flat in flats]


def _messages(call: Call) -> Iterator[Tensor]:
    bring = call.read_as_one if call.is_root else call.write_as_one
    return map(bring, messages_of(call.outputs))


BROADCAST = Collective("broadcast", _mpi, _steps, device=_device, tuned=True)
