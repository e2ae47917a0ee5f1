"""`all_reduce` and its algorithms."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mpisgd.accelerator.buffers import StagedOutput
from mpisgd.accelerator.runtime import on_device
from mpisgd.arguments import shown
from mpisgd.collectives.algorithms import ALGORITHMS
from mpisgd.collectives.dispatch import (
    Call,
    Collective,
    KnownCall,
    PreparedCall,
    known_call,
    link_of,
    operation_on,
    remember,
    run,
    run_at_once,
    transport_for,
)
from mpisgd.collectives.packing import messages_of, put
from mpisgd.collectives.tensor_arguments import check_output, lies_in_order
from mpisgd.collectives.uneven import beside_ranks_without_data, neutral
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.uneven_data import UnevenData, performs
from mpisgd.core.work import Work
from mpisgd.dtypes import HALF_DTYPES, ReduceOp, check_op, dtype_name
from mpisgd.errors import InvalidArgument
from mpisgd.interfaces.host_transport import HostTransport, Steps
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.device.backend import DeviceBackend
from mpisgd.transport.device.chunked_pipeline import goes_in_chunks, reduce_in_chunks
from mpisgd.transport.mpi_reduction import for_mpi
from mpisgd.transport.torch_reduction import for_torch
from mpisgd.transport.transports import TRANSPORTS
from mpisgd.tuning import CostModel

__all__ = [
    "ALL_REDUCE_COALESCED",
    "all_reduce",
    "choose_algorithm",
    "reduce_ahead",
    "reduce_tensor",
    "transport_named",
    "transports_for",
]

SPANS_HOSTS = {transport.name: transport.spans_hosts for transport in TRANSPORTS}
CHOICES: Sequence[str] = ("auto", "mpi", *SPANS_HOSTS, *ALGORITHMS)
NAMES = (ReduceOp, str)  # the types of what names a reduction
ALGORITHM_TEXT = {name: f"algorithm={name}" for name in CHOICES}


def all_reduce(
    tensor: Tensor,
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> Work | None:
    """Combine `tensor` over the group, in place; every rank ends with the same bits.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: any dense tensor on the CPU or a GPU, of the same shape and dtype on every rank; overwritten.
        op: elementwise combination, or its name ("avg"); AVG is SUM divided by `group.size`.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensor alone until its `wait()`.
        algorithm: `mpi` (MPI_Allreduce), `node` (shared memory, for ranks of one host), `direct` (each rank
            reads and writes the tensors of the others by cross-memory attach, for ranks of one host),
            `hierarchical` (shared memory on each of several hosts, messages between them), `ring`,
            `halving_doubling`, `reduce_broadcast`, `all_to_all`, or `auto`. Every name works for every job:
            between several hosts `node` and `direct` become `hierarchical`, on one host `hierarchical`
            becomes `node`, and on one rank the tensor stays as it is. An algorithm that is not available
            falls back with one warning: `direct` to `node`, and these three to `auto` if there is no shared
            memory. float16 and bfloat16 are summed in float32 by all algorithms and rounded once; `node`,
            `direct` and `all_to_all` move 16-bit floats, `hierarchical` float32 in the reduction between
            hosts and 16-bit floats afterwards, the others float32. For tensors on a GPU `auto` is NCCL where
            there is one; any other algorithm goes through host memory.

    Raises:
        UnsupportedTensor, UnsupportedOp, InvalidArgument: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank, `tensor` is unchanged.

    Cost: docs/concepts/transports.md has a table of the bytes and messages of each algorithm.
    """
    group = group_or_world(group)
    if not (in_order := lies_in_order(tensor)):
        check_output("all_reduce", tensor)
    key = known = None
    if type(op) in NAMES and type(algorithm) is str:
        key = (tensor.shape, tensor.dtype, not in_order and on_device(tensor), op, algorithm)
        known = group.known_calls.get(key)
    if known is None:  # its arguments are checked once, since small messages feel it
        known = _check_call(group, tensor, op, algorithm)
        remember(group, key, known)
    if in_order and async_op is False and not tensor.is_inference() and known.small.run_again(tensor):
        increment_version([tensor])
        return None
    if group.queue.uneven is None:
        return _start(group, tensor, known, async_op, in_order)
    with beside_ranks_without_data(group, "all_reduce", tensor, known.op, algorithm):
        return _start(group, tensor, known, async_op, in_order)


class _KnownCall(NamedTuple):
    """What is the same whenever tensors of one form are reduced."""

    operation: Operation
    op: ReduceOp
    row: Collective
    transport: HostTransport | None
    small: KnownCall


@performs("all_reduce")
def _beside_others(
    data: UnevenData,
    ranks: tuple[int, ...],
    ordinal: int,
    op: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    algorithm: str,
) -> None:
    """Call it on a rank without data."""
    tensor = neutral(ReduceOp[op], dtype, shape)
    all_reduce(tensor, ReduceOp[op], data.group_like(ranks, ordinal), algorithm=algorithm)


def _start(group: Group, tensor: Tensor, known: _KnownCall, async_op: bool, in_order: bool) -> Work | None:
    if known.small.at_once is not None and in_order:
        return run_at_once(group, known.small, tensor, outputs=[tensor], async_op=async_op)
    call = Call(group, known.operation, [tensor], op=known.op)
    if known.operation.device and goes_in_chunks(tensor):
        return run(known.row._replace(steps=None), call, async_op)
    return run(known.row, call, async_op, transport=known.transport)


def _check_call(group: Group, tensor: Tensor, op: ReduceOp | str, algorithm: str) -> _KnownCall:
    """Check the arguments and ask the table."""
    op = check_op("all_reduce", op, tensor.dtype)
    chosen = choose_algorithm(group, algorithm, tensor)
    operation = operation_on("all_reduce", tensor, op=op, extra=ALGORITHM_TEXT[chosen])
    row = ROWS[chosen] if algorithm == "auto" else ROWS[chosen]._replace(device=None)
    transport, at_once = transport_named(group, chosen), None
    if transport is not None and not operation.device:
        at_once = transport.all_reduce_at_once(tensor.numel(), tensor.dtype, op)
    return _KnownCall(operation, op, row, transport, known_call(group, operation, transport, at_once))


def transport_named(group: Group, algorithm: str) -> HostTransport | None:
    """Return the transport of a group whose all-reduce is this algorithm; None where it has no such one."""
    return next((transport for transport in group.transports if transport.name == algorithm), None)


def transports_for(group: Group, tensor: Tensor) -> list[HostTransport]:
    """Return the transports of a group that can all-reduce a tensor, the preferred one first."""
    return [each for each in group.transports if each.takes("all_reduce", tensor.dtype, tensor.nbytes)]


def choose_algorithm(group: Group, algorithm: str, tensor: Tensor) -> str:
    """Return the algorithm to use: the same on every rank for the same size and dtype."""
    if not isinstance(algorithm, str) or algorithm not in CHOICES:
        raise InvalidArgument(
            f"all_reduce: algorithm={shown(algorithm)}; expected one of {', '.join(CHOICES)}"
        )
    half = tensor.dtype in HALF_DTYPES
    if algorithm in SPANS_HOSTS:
        algorithm = _as_these_ranks_have_it(group, algorithm, tensor)
    if algorithm != "auto":
        return algorithm
    costs: CostModel = group.costs
    return costs.choose(_candidates(group, tensor, half), tensor.nbytes, half)


def _as_these_ranks_have_it(group: Group, algorithm: str, tensor: Tensor) -> str:
    """Return the algorithm that the name of a transport stands for in a group of this shape.

    On one rank there is nothing to do; `node` between hosts is `hierarchical`, and that is `node` on one.
    """
    if group.size == 1:
        return "mpi"
    ours = [transport.name for transport in transports_for(group, tensor)]
    if algorithm in ours:
        return algorithm
    instead = ours[0] if ours else "auto"
    if transport_named(group, algorithm) is not None:
        reason = f"takes no {tensor.nbytes} bytes of {dtype_name(tensor.dtype)}"
    elif not group.transports:
        reason = "needs shared memory, which its ranks cannot have"
    elif SPANS_HOSTS[algorithm] == group.spans_hosts:
        reason = "needs ranks that may reach each other's memory"
    else:
        return instead
    _warn(group, f"algorithm={algorithm!r} {reason}; it is {instead!r}")
    return instead


_warned: set[str] = set()


def _warn(group: Group, reason: str) -> None:
    """Tell of a fallback, once and from one rank."""
    if group.rank == 0 and reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"all_reduce in group '{group.name}': {reason}", RuntimeWarning, stacklevel=2)


def _candidates(group: Group, tensor: Tensor, half: bool) -> tuple[str, ...]:
    """Return the algorithms that `auto` may take, the best guess first where nothing was measured.

    MPI would get 16-bit floats as float32, so they go through what adds them by itself.
    """
    ours = tuple(transport.name for transport in transports_for(group, tensor))
    if not half:
        return (*ours, "mpi")
    return ours if ours and not group.spans_hosts else (*ours, "all_to_all")


def reduce_ahead(group: Group, flat: Tensor, op: ReduceOp) -> PreparedCall:
    """Return the all-reduce of contiguous `flat` [n] of the CPU, as a part of an operation in the queue.

    Its first part comes before the consistency check of that operation, so that it costs no other.
    """
    call = Call(group, operation_on("all_reduce", flat, op=op), [flat], op=op)
    return PreparedCall(AHEAD, call, transport_for(group, "all_reduce", flat.dtype, flat.nbytes))


def reduce_tensor(group: Group, tensor: Tensor, op: ReduceOp, algorithm: str) -> None:
    """Combine any tensor over the ranks in place, through the CPU; runs inside the queue."""
    in_chunks = goes_in_chunks(tensor)
    output = StagedOutput(tensor, keep=True, at_home=in_chunks)
    if in_chunks:
        reduce_in_chunks(output.flat, lambda chunk: reduce_flat(group, chunk, op, algorithm), group.streams)
    else:
        reduce_flat(group, output.flat, op, algorithm)
    output.copy_back()


def reduce_flat(group: Group, flat: Tensor, op: ReduceOp, algorithm: str) -> None:
    """Combine contiguous `flat` [n] over the ranks in place; runs inside the queue."""
    transport = transport_named(group, algorithm)
    if transport is not None:
        transport.all_reduce_now(flat, op)
    elif algorithm == "mpi":
        work, name, finish = for_mpi(flat, op, group.size)
        group.queue.communicator.all_reduce(work, name)
        put(finish(work), flat)
    elif algorithm == "all_to_all":  # sees all pieces at once, so it can add any dtype by itself
        ALGORITHMS[algorithm](link_of(group, "all_reduce"), flat, op)
    else:
        work, arithmetic, finish = for_torch(flat, op, group.size)
        ALGORITHMS[algorithm](link_of(group, "all_reduce"), work, arithmetic)
        put(finish(work), flat)


def _device(call: Call, backend: DeviceBackend) -> Callable[[], Any]:
    flats = [call.write_as_one(message, keep=True) for message in messages_of(call.outputs)]
    return lambda: [backend.all_reduce(flat, call.op) for flat in flats]


def _steps(call: Call, transport: HostTransport) -> Steps:
    return transport.all_reduce(call.write(call.outputs[0], keep=True), call.op)


def _row(algorithm: str) -> Collective:
    return Collective(
        "all_reduce",
        mpi=lambda call: reduce_tensor(call.group, call.outputs[0], call.op, algorithm),
        steps=_steps if algorithm in SPANS_HOSTS else None,
        device=_device,
    )


def _reduce_messages(call: Call) -> None:
    for message in messages_of(call.outputs):
        flat = call.write_as_one(message, keep=True)
        reduce_flat(call.group, flat, call.op, choose_algorithm(call.group, "auto", flat))


AHEAD = Collective("all_reduce", _row("mpi").mpi, _steps)
ROWS = {algorithm: _row(algorithm) for algorithm in CHOICES if algorithm != "auto"}
ALL_REDUCE_COALESCED = Collective("all_reduce_coalesced", _reduce_messages, device=_device)
