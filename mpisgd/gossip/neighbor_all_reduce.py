"""`neighbor_all_reduce`: the weighted sum of what a rank and its neighbours in a graph have."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from mpisgd.collectives.dispatch import Call, Collective, device_kind, operation_on, run
from mpisgd.collectives.packing import messages_of, put
from mpisgd.collectives.tensor_arguments import check_output, check_tensors
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import COMPLEX, FLOATING, SUMMED_IN_FLOAT32, dtype_name
from mpisgd.errors import InvalidArgument, UnsupportedOp
from mpisgd.gossip.graph import Exchange, Graph
from mpisgd.gossip.graphs import GraphLike, as_graph
from mpisgd.interfaces.host_transport import HostTransport, Steps
from mpisgd.job.lifecycle import group_or_world
from mpisgd.memory_ranges import Span, range_of
from mpisgd.transport.messages.link import frames

__all__ = [
    "WireDtype",
    "mix",
    "neighbor_all_reduce",
    "neighbor_all_reduce_coalesced",
    "neighbor_gather",
    "transfer",
    "transfer_steps",
]


def neighbor_gather(message: Tensor, graph: Graph, group: Group) -> dict[int, Tensor]:
    """Return the messages of the ranks that send to this one, by rank. Collective.

    Args:
        message: [n] bytes on the CPU, of the same size on all ranks.
        graph: whom each rank sends to; the same in every step.
        group: the ranks.

    Cost: sends the message to each neighbour.
    """
    exchange = graph.exchange(group.rank, group.size, 0)
    received = {src: torch.empty_like(message) for src in exchange.sources(group.rank)}
    operation = Operation("neighbor_gather", extra=f"{graph!r}, {message.numel()} bytes")
    row = Collective(
        "exchange_spans",
        partial(transfer, exchange=exchange, wire=message, received=received),
        partial(transfer_steps, wire=message, received=received),
    )
    run(row, Call(group, operation, list(received.values()), [message]), False)
    return received


def transfer(call: Call, exchange: Exchange, wire: Tensor, received: Mapping[int, Tensor]) -> None:
    """Send `wire` to the neighbours by messages, while theirs come into `received`, by rank."""
    # All neighbours take turns on the link. In a ring of 2 x 2 ranks at 500 Mbit/s messages of 0.4, 4 and
    # 24 MB took 1.1, 1.15 and 1.08 times the link's time, and 1.6, 1.4 and 1.2 times it as they are. On four
    # hosts at 100 Mbit/s 4 and 8 MB took 1.09 and 1.2 times as long as to one neighbour after the other.
    sends = [(dst, frame) for frame in frames(wire) for dst in exchange.destinations]
    receives = [(src, frame) for src, memory in received.items() for frame in frames(memory)]
    call.link.transfer(sends, receives)


def transfer_steps(
    call: Call, transport: HostTransport, wire: Tensor, received: Mapping[int, Tensor]
) -> Steps:
    """Show `wire` to all ranks, once, and read those of the neighbours; see `Collective.steps`."""
    receives = [Span(src, 0, *range_of(memory)) for src, memory in received.items()]
    return transport.exchange_spans([Span(call.group.rank, 0, *range_of(wire))], receives, wire.nbytes)


WireDtype = Callable[[torch.dtype], torch.dtype | None]


def neighbor_all_reduce(
    tensor: Tensor,
    topology: GraphLike,
    group: Group | None = None,
    async_op: bool = False,
    *,
    step: int = 0,
) -> Work | None:
    """Replace `tensor` by the weighted sum over this rank and its neighbours in a graph.

    Collective: all ranks of `group` call it in the same order. On rank i

        x[i] <- sum over j of W[i, j] x[j],  W the mixing matrix of the topology.

    Args:
        tensor: floating or complex, dense, of the same shape and dtype on every rank; overwritten. 16-bit
            floats are summed in float32 and rounded once.
        topology: a name ("ring", "torus", "hypercube", "exponential", "one_peer_exponential", "star",
            "complete", "random_pairs"), a graph of `mpisgd.gossip`, or a matrix W of which the rows or the
            columns sum to 1. Its ranks are those of the group.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensor alone until its `wait()`.
        step: the step of a topology that changes from step to step; the same on all ranks.

    Raises:
        UnsupportedTensor, UnsupportedOp, InvalidArgument: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank, `tensor` is unchanged.

    Cost: sends the tensor once to each neighbour, and keeps what it receives until it is added up. On one
        host it goes through shared memory. The consistency check of 16 bytes is among all ranks.
    """
    name, members = "neighbor_all_reduce", group_or_world(group)
    check_output(name, tensor)
    _check_dtype(name, "tensor", tensor)
    graph = _check_topology(name, topology, step, members.size)
    operation = operation_on(name, tensor, extra=repr(graph))
    return _run(Call(members, operation, [tensor]), graph, step, async_op)


def neighbor_all_reduce_coalesced(
    tensors: Sequence[Tensor],
    topology: GraphLike,
    group: Group | None = None,
    async_op: bool = False,
    *,
    step: int = 0,
) -> Work | None:
    """Do `neighbor_all_reduce` for each of `tensors`; small ones of one dtype are sent as one message.

    Args:
        tensors: dense tensors on one device, dtypes may be mixed; overwritten. The list may be empty, on all
            ranks, as for a model without parameters.
        topology: see `neighbor_all_reduce`.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensors alone until its `wait()`.
        step: the step of a topology that changes from step to step; the same on all ranks.
    """
    name, members = "neighbor_all_reduce_coalesced", group_or_world(group)
    checked = check_tensors(name, tensors, "tensors", output=True)
    for tensor in checked:
        _check_dtype(name, "tensor", tensor)
    graph = _check_topology(name, topology, step, members.size)
    return mix(checked, graph, members, step, async_op)


def mix(
    tensors: list[Tensor],
    graph: Graph,
    group: Group,
    step: int,
    async_op: bool = False,
    wire_dtype: WireDtype | None = None,
) -> Work | None:
    """Do the same for arguments that were checked.

    Args:
        tensors: see `neighbor_all_reduce_coalesced`, as for `graph`, `group`, `step` and `async_op`.
        wire_dtype: returns what a dtype is cast to on the wire. What the cast leaves out of a rank's tensor
            stays there: x <- W Q(x) + (x - Q(x)), so the sum over the ranks is as without it.
    """
    signature = " ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors)
    device = device_kind(tensors[0] if tensors else None)
    extra = f"{graph!r}, {signature}"
    operation = Operation("neighbor_all_reduce_coalesced", extra=extra, device=device)
    return _run(Call(group, operation, tensors), graph, step, async_op, wire_dtype)


def _check_dtype(name: str, what: str, tensor: Tensor) -> None:
    if tensor.dtype not in (*FLOATING, *COMPLEX):
        raise UnsupportedOp(f"{name}: {what} is of {tensor.dtype}, which has no weighted sum; convert it")


def _check_topology(name: str, topology: object, step: object, size: int) -> Graph:
    graph = as_graph(name, topology)
    if not isinstance(step, int) or step < 0:
        raise InvalidArgument(f"{name}: step={step!r}; expected an integer from 0 on")
    graph.check(size)
    return graph


def _run(
    call: Call, graph: Graph, step: int, async_op: bool, wire_dtype: WireDtype | None = None
) -> Work | None:
    size = call.group.size
    if graph.num_phases(size) != 1:
        call.operation = call.operation._replace(when=f"step {step}")
    neighbours = _Neighbours(graph.exchange(call.group.rank, size, step), wire_dtype)
    row = Collective("exchange_spans", neighbours.by_messages, neighbours.in_steps)
    return run(row, call, async_op)


class _Neighbours:
    """One exchange of a rank with its neighbours, on any transport."""

    def __init__(self, exchange: Exchange, wire_dtype: WireDtype | None) -> None:
        self._exchange = exchange
        self._wire_dtype = wire_dtype

    def by_messages(self, call: Call) -> None:
        """Send each message to the neighbours, while theirs come."""
        for flat, wire, received in self._messages(call):
            transfer(call, self._exchange, wire, received)
            self._add_up(flat, wire, received, call.group.rank)

    def in_steps(self, call: Call, transport: HostTransport) -> Steps:
        """Write each message once, and read the neighbours' ones."""
        for flat, wire, received in self._messages(call):
            yield from transfer_steps(call, transport, wire, received)
            self._add_up(flat, wire, received, call.group.rank)

    def _messages(self, call: Call) -> Iterator[tuple[Tensor, Tensor, dict[int, Tensor]]]:
        """Yield what this rank has, what of it travels, and memory for what comes from each neighbour."""
        for tensors in messages_of(call.outputs):
            flat = call.write_as_one(tensors, keep=True)
            dtype = None if self._wire_dtype is None else self._wire_dtype(flat.dtype)
            wire = flat if dtype is None else flat.to(dtype)
            yield flat, wire, {src: torch.empty_like(wire) for src in self._exchange.sources(call.group.rank)}

    def _add_up(self, flat: Tensor, wire: Tensor, received: Mapping[int, Tensor], rank: int) -> None:
        """Overwrite `flat` by the sum of the terms, in the order of the ranks: equal rows give equal bits."""
        wide = torch.float32 if flat.dtype in SUMMED_IN_FLOAT32 else flat.dtype
        left_out = None if wire is flat else flat.to(wide) - wire.to(wide)
        parts = {**received, rank: wire}
        total = _weighted_sum([(parts[src].to(wide), weight) for src, weight in self._exchange.terms])
        if total is None:
            total = torch.zeros_like(flat)
        if left_out is not None:
            total = total.add_(left_out)
        put(total, flat)


def _weighted_sum(terms: Sequence[tuple[Tensor, float]]) -> Tensor | None:
    """Return the sum of weight * tensor; overwrites the first tensor. None if there are no terms."""
    if not terms:
        return None
    (first, weight), *rest = terms
    total = first.mul_(weight)
    for tensor, weight in rest:
        total.add_(tensor, alpha=weight)
    return total
