"""The transport table: which transports can do a collective, which of them does a call, and how it runs.

Every collective has a row (`Collective`): what it is on each transport, as a small function of a `Call`.
`run` takes the first transport that the group and the call's tensors allow:

    device             tensors on a GPU, from where they lie: NCCL or CUDA-aware MPI, where the group has one
    group.transports   tensors in host memory: the first that takes the operation, where the message is large
                       enough; an all-reduce has chosen among them (see `all_reduce.choose_algorithm`)
    mpi                the library's own collectives, or messages

All but the first take tensors of a GPU through host memory.

The choice depends on nothing but what the ranks compare (the collective, sizes, the group) and the job's
profile, where `tune` has measured the collective: so all ranks agree.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mpisgd.accelerator.capture import check_not_capturing
from mpisgd.accelerator.runtime import on_device, runtime
from mpisgd.collectives.packing import Packer
from mpisgd.collectives.staging_check import run_first_part
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.submission import RepeatedOperation
from mpisgd.core.work import CompletableWork, Work
from mpisgd.dtypes import ReduceOp, dtype_name
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.interfaces.host_transport import AtOnce, HostTransport, Steps
from mpisgd.transport.device.backend import DeviceBackend
from mpisgd.transport.device.stream_guard import StreamGuard
from mpisgd.transport.device.transport import DeviceTransport, device_transport
from mpisgd.transport.messages.link import Link

__all__ = [
    "FROM_BYTES",
    "TUNED",
    "Call",
    "Collective",
    "KnownCall",
    "PreparedCall",
    "device_backend",
    "device_kind",
    "known_call",
    "known_transfer",
    "link_of",
    "operation_on",
    "remember",
    "run",
    "run_at_once",
    "run_in_queue",
    "transport_for",
]

TUNED = ("broadcast", "all_gather", "all_to_all")  # those of which MPI's own may be the better one
# From how many bytes on (of the larger side of a rank) a transport is taken where nobody has measured.
# Small messages are fast in shared memory because the consistency check is their only barrier; for large ones
# two copies through the cache may take less time than MPI's one between address spaces. That is a matter of
# the machine: 16 MiB took an all-gather 0.7 of MPI's time on an AMD EPYC and 1.3 times as long on an Intel
# Xeon, hence `tune`. Up to 2 MiB MPI's own all_gather and all_to_all won on the Xeon, and on the EPYC their
# time and a consistency check's came to as much as shared memory's; 4 ranks on 2 cores lost a tenth or won a
# third. Measured with `mpirun -n 2 python -m mpisgd bench collectives --sizes 4KiB,64KiB,1MiB,16MiB,64MiB`,
# and with -n 4. The collectives that are not listed always take it: MPI's own would need scratch memory or
# more steps.
FROM_BYTES = {"all_gather": 2 * 2**20, "all_to_all": 2 * 2**20}
# Up to so many bytes, too: then the consistency check is the only meeting of the ranks.
SMALL_BYTES = {"all_gather": 2**15}

MAX_KNOWN_CALLS = MAX_KNOWN_OPERATIONS = 1024


class Call(Packer):
    """One call of a collective, its arguments checked, and the memory in which its tensors travel.

    Attributes:
        group: its ranks.
        operation: what the ranks must agree on.
        outputs: what its Work's future holds, in most cases the tensors that are overwritten.
        inputs: the tensors that are only read.
        op: of a reduction.
        sizes: elements that come from each rank and that go to each, where they differ.
        like: one of the tensors, None if there are none: where it lies, all do.
    """

    __slots__ = ("group", "inputs", "like", "op", "operation", "outputs", "sizes")

    def __init__(
        self,
        group: Group,
        operation: Operation,
        outputs: list[Tensor],
        inputs: Sequence[Tensor] = (),
        *,
        op: ReduceOp | None = None,
        sizes: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        self.group = group
        self.operation = operation
        self.outputs = outputs
        self.inputs = inputs
        self.op: Any = op
        self.sizes = sizes
        self.like = outputs[0] if outputs else inputs[0] if inputs else None
        self.on_device = False
        self._outputs = []

    @property
    def root(self) -> int:
        """The group rank of src or dst."""
        return self.operation.root

    @property
    def is_root(self) -> bool:
        """Whether this rank is src or dst."""
        return self.group.rank == self.operation.root

    @property
    def communicator(self) -> GroupCommunicator:
        """The communicator of the group's queue."""
        return self.group.queue.communicator

    @property
    def link(self) -> Link:
        """The same as the algorithms see it."""
        return link_of(self.group, self.operation.kind)


class Collective(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the operation of `HostTransport` that it needs.
        mpi: does a call by MPI's collectives or messages, after the ranks have agreed on it.
        steps: does it through a transport of host memory; see `mpisgd.interfaces.host_transport`.
        device: packs the tensors where they lie, and returns what then begins the operation there.
        tuned: whether MPI's own may be the quicker one, depending on the size.
    """

    name: str
    mpi: Callable[[Call], None]
    steps: Callable[[Call, HostTransport], Steps] | None = None
    device: Callable[[Call, DeviceBackend], Callable[[], Any]] | None = None
    tuned: bool = False


def run(
    row: Collective, call: Call, async_op: bool, nbytes: int = 0, *, transport: HostTransport | None = None
) -> Work | None:
    """Do a call by the best transport for it, in the queue of its group.

    Args:
        row: what the collective is on each transport.
        call: its arguments.
        async_op: return at once with a `Work`.
        nbytes: of the larger side of a rank; left out where ranks do not know each other's sizes.
        transport: what the row's steps go through, where the caller has chosen it.
    """
    like = call.like
    on_host = like is None or not on_device(like)
    if like is not None and row.device is not None and not on_host:
        dtypes = [tensor.dtype for tensor in call.outputs] if call.op is not None else []
        backend = device_backend(call.group, call.operation, like, op=call.op, dtypes=dtypes)
        if backend is not None:
            return _run_on_device(row.device, backend, call, like.device, async_op)
    if transport is None and row.steps is not None:
        dtype = call.outputs[0].dtype if call.op is not None and len(call.outputs) == 1 else None
        transport = transport_for(call.group, row.name, dtype, nbytes, tuned=row.tuned)
    prepared = PreparedCall(row, call, transport)
    before = None if transport is None else prepared.begin
    name = "mpi" if transport is None else transport.name
    # A small message feels every call, and on the host no streams are to be kept in order.
    start: Callable[..., Work | None] = call.group.queue.run if on_host else partial(run_in_queue, call.group)
    return start(
        call.operation,
        prepared.run,
        tensors=call.outputs,
        async_op=async_op,
        before=before,
        transport=name,
        like=like,
    )


class PreparedCall:
    """A call whose transport is chosen: nothing is read or written before its turn in the queue.

    Args:
        row: what the collective is.
        call: its arguments.
        transport: what its steps go through; None: MPI.
    """

    __slots__ = ("_call", "_row", "_steps", "_transport")

    def __init__(self, row: Collective, call: Call, transport: HostTransport | None) -> None:
        self._row = row
        self._call = call
        self._transport = transport

    def begin(self) -> None:
        """Come to the consistency check."""
        if self._transport is not None:
            assert self._row.steps is not None
            call = self._call
            self._steps = self._row.steps(call, self._transport)
            if call.group.checks_staging:
                first_part = partial(next, self._steps, None)
                run_first_part(first_part, self._transport, [*call.inputs, *call.outputs])
            else:
                next(self._steps, None)

    def run(self) -> None:
        """Do the rest, after the check."""
        if self._transport is None:
            self._row.mpi(self._call)
        else:
            self._transport.run_steps(self._steps)
        self._call.finish()


def transport_for(
    group: Group, collective: str, dtype: torch.dtype | None, nbytes: int, *, tuned: bool = False
) -> HostTransport | None:
    """Return the transport of an operation; None where MPI takes it. The same on all ranks.

    Args:
        group: its ranks.
        collective: see `HostTransport.takes`, as for `dtype` and `nbytes`.
        tuned: whether MPI's own may be the quicker one, depending on the size.
    """
    for transport in group.transports:
        if transport.takes(collective, dtype, nbytes):
            return transport if not tuned or _beats_mpi(group, transport, collective, nbytes) else None
    return None


class KnownCall(NamedTuple):
    """What is the same whenever a collective is called with arguments of one form.

    Attributes:
        operation: what the ranks must agree on.
        run_again: `OperationQueue.run_again` of it; always False where it needs steps or is watched.
        at_once: does it without steps; None where it needs some, or moves nothing.
        transport: of `at_once`.
    """

    operation: Operation
    run_again: Callable[[Any], bool]
    at_once: AtOnce[Any] | None = None
    transport: HostTransport | None = None


def remember(group: Group, key: Any, known: Any) -> None:
    """Let later calls of this form find in `group.known_calls` what is known of it; key None: they do not."""
    if key is not None:
        if len(group.known_calls) >= MAX_KNOWN_CALLS:
            group.known_calls.clear()
        group.known_calls[key] = known


def known_call(
    group: Group, operation: Operation, transport: HostTransport | None, at_once: AtOnce[Any] | None
) -> KnownCall:
    """Return what is known of an operation, which needs no steps if `at_once` of `transport` does it."""
    if at_once is None:
        return KnownCall(operation, _never)
    again = RepeatedOperation(operation, at_once.begin, at_once.finish)
    run_again = _never if group.checks_staging else partial(group.queue.run_again, again)
    return KnownCall(operation, run_again, at_once, transport)


def known_transfer(
    group: Group,
    row: Collective,
    operation: Operation,
    nbytes: int,
    at_once: Callable[[HostTransport], AtOnce[Any] | None],
) -> KnownCall:
    """Return what is known of calls on the host that only move data, by the transport that `run` takes.

    Args:
        group: of the operation.
        row: what the collective is.
        operation: what the ranks must agree on.
        nbytes: as for `run`.
        at_once: tells how a transport does it without steps.
    """
    transport = transport_for(group, row.name, None, nbytes, tuned=row.tuned)
    return known_call(group, operation, transport, None if transport is None else at_once(transport))


def _never(_: Any) -> bool:
    """Do nothing, and return False."""
    return False


def run_at_once(
    group: Group,
    known: KnownCall,
    tensors: Any,
    *,
    outputs: list[Tensor],
    inputs: Sequence[Tensor] = (),
    async_op: bool,
) -> Work | None:
    """Do a call that needs no steps where `known.run_again` has not done it.

    Args:
        group: its ranks.
        known: of calls of this form, with `at_once`.
        tensors: as `at_once` takes them.
        outputs: those of them that are overwritten on this rank.
        inputs: the others.
        async_op: return at once with a `Work`.
    """
    at_once, transport = known.at_once, known.transport
    assert at_once is not None
    assert transport is not None
    begin = partial(at_once.begin, tensors)
    if group.checks_staging:
        begin = partial(run_first_part, begin, transport, [*inputs, *outputs])
    return group.queue.run(
        known.operation,
        partial(_finish_at_once, at_once, tensors, outputs),
        tensors=outputs or list(inputs),
        async_op=async_op,
        before=begin,
        transport=transport.name,
    )


def _finish_at_once(at_once: AtOnce[Any], tensors: Any, outputs: list[Tensor]) -> None:
    at_once.finish(tensors)
    increment_version(outputs)


def _beats_mpi(group: Group, transport: HostTransport, collective: str, nbytes: int) -> bool:
    if collective not in group.costs.collectives:
        return nbytes >= FROM_BYTES.get(collective, 0) or nbytes <= SMALL_BYTES.get(collective, 0)
    chosen: str = group.costs.choose((transport.name, "mpi"), nbytes, collective=collective)
    return chosen == transport.name


def _run_on_device(
    begin: Callable[[Call, DeviceBackend], Callable[[], Any]],
    backend: DeviceBackend,
    call: Call,
    device: torch.device,
    async_op: bool,
) -> Work | None:
    call.on_device = True
    launch = begin(call, backend)
    return backend.run(
        call.operation, launch, call.finish, tensors=call.outputs, device=device, async_op=async_op
    )


def device_backend(
    group: Group,
    operation: Operation,
    tensor: Tensor,
    *,
    op: ReduceOp | None = None,
    dtypes: Sequence[torch.dtype] = (),
) -> DeviceBackend | None:
    """Return the backend that runs an operation on the device; None: its tensors go through host memory.

    Collective at the group's first operation on a device.

    Args:
        group: of the operation.
        operation: what it is.
        tensor: one of its tensors; where it is, all are.
        op: of a reduction.
        dtypes: of what is reduced.
    """
    if not on_device(tensor):
        return None
    backend = _device_transport(group, operation, tensor).backend
    if backend is None or not all(backend.takes(op, dtype) for dtype in dtypes):
        return None
    return backend


def _device_transport(group: Group, operation: Operation, tensor: Tensor) -> DeviceTransport:
    check_not_capturing(operation.kind)
    return device_transport(group, tensor, operation, group.job.gpu)


def run_in_queue(
    group: Group,
    operation: Operation,
    action: Callable[[], None],
    *,
    tensors: Any,
    async_op: bool,
    like: Tensor | None,
    before: Callable[[], None] | None = None,
    after: Work | None = None,
    transport: str = "mpi",
) -> Work | None:
    """Run an action on the host in the group's queue; on a device its copies keep the order of the streams.

    Args:
        group: of the operation.
        operation: see `OperationQueue.run`, as for `action`, `tensors`, `async_op`, `before` and `after`.
        like: one of its tensors; where it is, all are. None: it has none.
        transport: see `OperationQueue.run`.
    """
    guard = None
    if like is not None and on_device(like):
        _device_transport(group, operation, like)
        guard = StreamGuard(like.device, group.streams.get("copies", like.device), waits=async_op)
        action, transport = guard.to_its_end(action), f"{transport}, through host memory"
        before = None if before is None else guard.through(before)
    work = group.queue.run(
        operation,
        action,
        tensors=tensors,
        async_op=async_op,
        before=before,
        after=after,
        transport=transport,
        like=like,
    )
    if guard is not None and work is None:
        guard.join()
    elif guard is not None:
        assert isinstance(work, CompletableWork)
        work.stream = guard.stream
    return work


def operation_on(
    kind: str, tensor: Tensor, *, op: ReduceOp | None = None, root: int = -1, extra: str = ""
) -> Operation:
    """Describe an operation whose tensor must be alike on all ranks."""
    return _operation(kind, op, tensor.dtype, tensor.shape, root, extra, device_kind(tensor))


@lru_cache(MAX_KNOWN_OPERATIONS)  # programs repeat themselves, and small messages feel what this takes
def _operation(
    kind: str, op: ReduceOp | None, dtype: torch.dtype, shape: torch.Size, root: int, extra: str, device: str
) -> Operation:
    name = op.name if op is not None else ""
    return Operation(kind, name, dtype_name(dtype), tuple(shape), root, extra, device)


def device_kind(tensor: Tensor | None) -> str:
    """Return the kind of a tensor's device, as in `Operation`; ranks may have different numbers of it."""
    return runtime().kind if tensor is not None and on_device(tensor) else ""


def link_of(group: Group, kind: str) -> Link:
    """Return the queue's communicator as the algorithms see it."""
    queue = group.queue
    return Link(queue.communicator, f"{kind} (group '{group.name}')", queue.consistency.timeout_s)
