"""`bench collectives`: mpisgd's beside MPI's own calls, other frameworks, and what memory or link allow."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import mpisgd
from mpisgd.bench.cases import Case, case_of, link_bytes
from mpisgd.bench.measure import Measured, Timed, Unavailable, Variant, measure
from mpisgd.bench.payload import Payload
from mpisgd.bench.peers import Peers, RemoteVariant
from mpisgd.bench.schedule import Pace
from mpisgd.bench.summary import LIMIT, collective_rows
from mpisgd.comm.job import topology, world

if TYPE_CHECKING:
    from mpisgd.comm.mpi import Wire

__all__ = ["CollectivesPlan", "run_collectives"]

MPI_NAME = "MPI"
Call = Callable[[], Any]


@dataclass(frozen=True)
class CollectivesPlan:
    """What to measure.

    Attributes:
        collectives: some of COLLECTIVES.
        sizes: in bytes, as nccl-tests count them.
        dtypes: some of ITEM_BYTES.
        algorithms: of mpisgd.all_reduce; the others have none to choose.
        pace: for each case.
    """

    collectives: Sequence[str]
    sizes: Sequence[int]
    dtypes: Sequence[str]
    algorithms: Sequence[str]
    pace: Pace

    def cases(self, size: int) -> Iterator[Case]:
        """Yield every case, each once although small sizes may round up to the same."""
        seen = set()
        for collective in self.collectives:
            for dtype in self.dtypes:
                for nbytes in self.sizes:
                    case = case_of(collective, dtype, nbytes, size)
                    if case not in seen:
                        seen.add(case)
                        yield case


def run_collectives(
    plan: CollectivesPlan, peers: Peers, report: Callable[[Case, list[dict[str, Any]]], None]
) -> dict[str, Any]:
    """Measure the cases of `plan`; return rows, and what was left out. Collective.

    Args:
        plan: the same on every rank.
        peers: other frameworks.
        report: called with the rows of each case.
    """
    wire = world().lane.wire.duplicate()
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for case in plan.cases(mpisgd.size()):
        found = _measure(case, plan, peers, wire)
        peers.drop_broken()
        new = collective_rows(case, found.seconds)
        report(case, new)
        rows += new
        left_out += [_left_out(case, name, reason) for name, reason in found.left_out.items()]
    wire.free()
    return {"rows": rows, "left_out": left_out}


def _left_out(case: Case, variant: str, reason: str) -> dict[str, Any]:
    where = {"collective": case.collective, "dtype": case.dtype, "bytes": case.nbytes}
    return {**where, "variant": variant, "reason": reason}


def _measure(case: Case, plan: CollectivesPlan, peers: Peers, wire: "Wire") -> Measured:
    payload = Payload(case, mpisgd.rank())
    algorithms = plan.algorithms if case.collective == "all_reduce" else ["auto"]
    variants: list[Variant] = [*_ours(payload, algorithms), _mpis(payload, wire)]
    for framework, child in peers.children.items():
        variants.append(RemoteVariant(framework, child, case))
    return measure([*variants, _limit(case, wire)], plan.pace)


def _in_rank(
    name: str, call: Call, payload: Payload | None, *, ours: bool = False, start: Call = mpisgd.barrier
) -> Timed:
    """Return a variant of this process; one without a payload has no result to check."""
    return Timed(
        name,
        call,
        reset=payload.reset if payload else lambda: None,
        verify=payload.verify if payload else lambda: None,
        start=start,
        clock=time.perf_counter,
        ours=ours,
    )


# -- mpisgd --------------------------------------------------------------------------------------------


def _ours(payload: Payload, algorithms: Iterable[str]) -> Iterator[Timed]:
    """Yield mpisgd's collective, with each algorithm."""
    for algorithm in algorithms:
        name = "mpisgd" if algorithm == "auto" else f"mpisgd {algorithm}"
        yield _in_rank(name, _our_call(payload, algorithm), payload, ours=True)


def _our_call(payload: Payload, algorithm: str) -> Call:
    given, out, next_root = payload.input, payload.output, payload.next_root
    inputs, outputs = list(given.chunk(payload.case.size)), list(out.chunk(payload.case.size))

    def gather() -> None:
        root = next_root()
        mpisgd.gather(given, outputs if root == payload.rank else None, root)

    def scatter() -> None:
        root = next_root()
        mpisgd.scatter(out, inputs if root == payload.rank else None, root)

    calls: dict[str, Call] = {
        "all_reduce": lambda: mpisgd.all_reduce(out, algorithm=algorithm),
        "reduce": lambda: mpisgd.reduce(out, next_root()),
        "broadcast": lambda: mpisgd.broadcast(out, next_root()),
        "reduce_scatter": lambda: mpisgd.reduce_scatter_tensor(out, given),
        "all_gather": lambda: mpisgd.all_gather_into_tensor(out, given),
        "all_to_all": lambda: mpisgd.all_to_all_single(out, given),
        "gather": gather,
        "scatter": scatter,
    }
    return calls[payload.case.collective]


# -- MPI -----------------------------------------------------------------------------------------------


def _mpis(payload: Payload, wire: "Wire") -> Variant:
    """Return MPI's own call on the same memory, as lean as mpi4py can make it: nothing is prepared in it."""
    from mpisgd.comm.mpi import ELEMENT_TYPES

    case = payload.case
    if case.reduces and payload.input.dtype not in ELEMENT_TYPES:
        return Missing(MPI_NAME, f"MPI has no arithmetic for {case.dtype}")
    return _in_rank(MPI_NAME, _mpi_call(payload, wire), payload)


def _mpi_call(payload: Payload, wire: "Wire") -> Call:
    from mpisgd.comm.mpi import ELEMENT_TYPES, MPI

    def spec(tensor: torch.Tensor, pieces: int = 1) -> list[Any]:
        memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        if payload.case.reduces:
            return [memory, tensor.numel(), ELEMENT_TYPES[tensor.dtype]]
        return [memory, tensor.nbytes // pieces, MPI.BYTE]

    comm, rank, size, next_root = wire.comm, payload.rank, payload.case.size, payload.next_root
    given, out = payload.input, payload.output
    whole, half = spec(out), spec(given)
    in_pieces, out_pieces = spec(given, size), spec(out, size)
    per_rank = [half[0], out.numel(), half[2]]

    def reduce() -> None:
        if (root := next_root()) == rank:
            comm.Reduce(MPI.IN_PLACE, whole, root=root)
        else:
            comm.Reduce(whole, None, root=root)

    def gather() -> None:
        root = next_root()
        comm.Gather(half, out_pieces if root == rank else None, root)

    def scatter() -> None:
        root = next_root()
        comm.Scatter(in_pieces if root == rank else None, whole, root)

    calls: dict[str, Call] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, whole),
        "reduce": reduce,
        "broadcast": lambda: comm.Bcast(whole, next_root()),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(per_rank, whole),
        "all_gather": lambda: comm.Allgather(half, out_pieces),
        "all_to_all": lambda: comm.Alltoall(in_pieces, out_pieces),
        "gather": gather,
        "scatter": scatter,
    }
    return calls[payload.case.collective]


class Missing:
    """A variant that cannot be had, and why."""

    ours = False

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def check(self) -> None:
        """See `Variant`."""
        raise Unavailable(self._reason)

    def time(self, calls: int) -> float:
        """See `Variant`."""
        raise Unavailable(self._reason)

    def release(self) -> None:
        """See `Variant`."""


# -- the limit -----------------------------------------------------------------------------------------


def _limit(case: Case, wire: "Wire") -> Timed:
    """Return what bounds a case: on one host copying its bytes, between hosts passing them over the link."""
    if mpisgd.num_nodes() == 1:
        return _in_rank(LIMIT, _memcpy(case), None)
    nbytes = round(link_bytes(case, [len(ranks) for ranks in topology().nodes]))
    return _in_rank(LIMIT, _exchange(max(1, nbytes), wire), None)


def _memcpy(case: Case) -> Call:
    """Return a copy of the case's bytes; all ranks copy at once."""
    source = torch.ones(case.nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def _exchange(nbytes: int, wire: "Wire") -> Call:
    """Return what sends the bytes that must leave a host to the next one, while as many come in.

    One rank of each host does it; the others have nothing to do.
    """
    from mpisgd.comm.mpi import MPI

    nodes, here = topology().nodes, topology()
    if here.local_rank != 0:
        return lambda: None
    sent, got = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    give, take = ([MPI.buffer.fromaddress(t.data_ptr(), nbytes), nbytes, MPI.BYTE] for t in (sent, got))
    to, source = (nodes[(here.node_rank + step) % here.num_nodes][0] for step in (1, -1))

    def call(keep: tuple[torch.Tensor, torch.Tensor] = (sent, got)) -> None:
        wire.comm.Sendrecv(give, to, recvbuf=take, source=source)

    return call
