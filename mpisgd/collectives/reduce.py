"""`reduce`: everyone's tensor becomes one, on one rank."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mpisgd.collectives.dispatch import Call, Collective, operation_on, run
from mpisgd.collectives.packing import put
from mpisgd.collectives.tensor_arguments import check_output
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp, check_op
from mpisgd.interfaces.host_transport import HostTransport, Steps
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.device.backend import DeviceBackend
from mpisgd.transport.mpi_reduction import for_mpi

__all__ = ["reduce"]


def reduce(
    tensor: Tensor,
    dst: int,
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `tensor` over the group into that of rank `dst`; on the other ranks it is unchanged.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: same shape and dtype on every rank; overwritten on `dst`, unchanged elsewhere.
        dst: global rank of the one that gets the result.
        op: elementwise combination, or its name ("avg"); AVG is SUM divided by `group.size`.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensor alone until its `wait()`.

    Raises:
        UnsupportedTensor, UnsupportedOp, InvalidRank: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.

    Cost: on one host, through shared memory; else MPI_Reduce.
    """
    group = group_or_world(group)
    check_output("reduce", tensor)
    op = check_op("reduce", op, tensor.dtype)
    root = group.group_rank("reduce", "dst", dst)
    call = Call(group, operation_on("reduce", tensor, op=op, root=root), [tensor], op=op)
    return run(REDUCE, call, async_op, tensor.nbytes)


def _flat(call: Call) -> Tensor:
    (tensor,) = call.outputs
    return call.write(tensor, keep=True) if call.is_root else call.read(tensor)


def _mpi(call: Call) -> None:
    flat = _flat(call)
    work, name, finish = for_mpi(flat, call.op, call.group.size)
    call.communicator.reduce(work, name, call.root)
    if call.is_root:
        put(finish(work), flat)


def _steps(call: Call, transport: HostTransport) -> Steps:
    return transport.reduce(_flat(call), call.op, call.root)


def _device(call: Call, backend: DeviceBackend) -> Callable[[], Any]:
    flat = _flat(call)
    return lambda: backend.reduce(flat, call.root, call.op)


REDUCE = Collective("reduce", _mpi, _steps, device=_device)
