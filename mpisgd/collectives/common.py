"""What the collectives share: how they are described to the other ranks, and how they are run."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device, runtime
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp, dtype_name
from mpisgd.job.lifecycle import current_job
from mpisgd.transport.cma.transport import CmaTransport
from mpisgd.transport.device.device_collectives import DeviceCollectives
from mpisgd.transport.device.transport import device_transport_of
from mpisgd.transport.internode.transport import InternodeTransport
from mpisgd.transport.messages.link import Link
from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["device_word", "direct_of", "link_of", "operation_on", "run", "run_in_steps"]


def operation_on(
    kind: str, tensor: Tensor, *, op: ReduceOp | None = None, root: int = -1, extra: str = ""
) -> Operation:
    """Describe an operation whose tensor must be alike on all ranks."""
    name = op.name if op is not None else ""
    shape, device = tuple(tensor.shape), runtime().kind if on_device(tensor) else ""
    return Operation(kind, name, dtype_name(tensor.dtype), shape, root, extra, device)


def device_word(tensor: Tensor | None) -> str:
    """Return what `Operation` calls the place of a tensor. Ranks may have devices of different numbers."""
    return runtime().kind if tensor is not None and on_device(tensor) else ""


def direct_of(
    group: Group,
    operation: Operation,
    tensor: Tensor,
    *,
    op: ReduceOp | None = None,
    dtypes: Sequence[torch.dtype] = (),
) -> DeviceCollectives | None:
    """Return what carries an operation out where its tensors lie, None where host memory is the way.

    Collective at the group's first operation on a device.

    Args:
        group: of the operation.
        operation: what it is.
        tensor: one of its tensors; where it is, all are.
        op: of a reduction.
        dtypes: of its tensors, if not that of `tensor` alone.
    """
    if not on_device(tensor):
        return None
    direct = device_transport_of(group, tensor, operation, current_job().gpu).direct
    if direct is None or not all(direct.takes(op, dtype) for dtype in dtypes or (tensor.dtype,)):
        return None
    return direct


def run(
    group: Group,
    operation: Operation,
    action: Callable[[], None],
    *,
    tensors: Any,
    async_op: bool,
    like: Tensor | None,
    before: Callable[[], None] | None = None,
    after: Work | None = None,
    way: str = "mpi",
) -> Work | None:
    """Run an operation in the group's queue; on a device its copies keep the order of the streams.

    Args:
        group: of the operation.
        operation: see `OperationQueue.run`, as for `action`, `tensors`, `async_op`, `before` and `after`.
        like: one of its tensors; where it is, all are. None: it has none.
        way: what moves it; see `transport` of `OperationQueue.run`.
    """
    queue = group.queue
    if like is None or not on_device(like):
        return queue.run(
            operation,
            action,
            tensors=tensors,
            async_op=async_op,
            before=before,
            after=after,
            transport=way,
            like=like,
        )
    plane = device_transport_of(group, like, operation, current_job().gpu)
    passage = plane.passage(like.device, waits=async_op)
    work = queue.run(
        operation,
        passage.to_its_end(action),
        tensors=tensors,
        async_op=async_op,
        before=None if before is None else passage.through(before),
        after=after,
        transport=f"{way}, through host memory",
        like=like,
    )
    if work is None:
        passage.join()
    return work


def link_of(group: Group, kind: str) -> Link:
    """Return the queue's communicator as the algorithms see it."""
    queue = group.queue
    return Link(queue.wire, f"{kind} (group '{group.name}')", queue.consistency.timeout_s)


def run_in_steps(
    group: Group,
    plane: ShmTransport | CmaTransport | InternodeTransport,
    operation: Operation,
    steps: Iterator[None],
    *,
    tensors: Sequence[Tensor],
    async_op: bool,
    like: Tensor | None = None,
) -> Work | None:
    """Run an operation on a plane: a generator that yields wherever all ranks must have come.

    The first of these places is the handshake; what comes before it is done when the operation's turn has
    come, and may write into this rank's coming half of the staging memory and nothing else.

    `like` is one of its tensors, if not the first of `tensors`.
    """
    return run(
        group,
        operation,
        lambda: plane.run_steps(steps),
        tensors=tensors,
        async_op=async_op,
        like=tensors[0] if like is None and tensors else like,
        before=lambda: next(steps),
        way="hierarchical" if isinstance(plane, InternodeTransport) else "node",
    )
