"""`bench collectives`: mpisgd's beside MPI's own calls, other frameworks, and what memory or link allow."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import mpisgd
from mpisgd.bench.cases import Case, case_of
from mpisgd.bench.hardware_limits import bounds, keep_faster_limit
from mpisgd.bench.measure import Pace, Timed, Unavailable, Variant, measure, timed
from mpisgd.bench.network import open_ring
from mpisgd.bench.payload import Payload, torch_call
from mpisgd.bench.peers.remote import Peers
from mpisgd.bench.report.rows import as_bytes, collective_rows
from mpisgd.core.group import Group
from mpisgd.job.lifecycle import world

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

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
    plan: CollectivesPlan, peers: Peers, report: Callable[[str, Any], None]
) -> dict[str, Any]:
    """Measure the cases of `plan`; return rows, and what was left out. Collective.

    Args:
        plan: the same on every rank.
        peers: other frameworks.
        report: called with each case and its rows.
    """
    communicator = world().queue.communicator.duplicate()
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    with open_ring() as ring:
        for case in plan.cases(mpisgd.size()):
            found = measure(
                [*_contestants(case, plan, peers, communicator), *bounds(case, communicator, ring)], plan.pace
            )
            keep_faster_limit(found.seconds)
            peers.drop_broken()
            new = collective_rows(case, found.seconds)
            report(f"{case.collective} {case.dtype} {as_bytes(case.nbytes)}", new)
            rows += new
            left_out += found.left_out_of(collective=case.collective, dtype=case.dtype, bytes=case.nbytes)
    communicator.free()
    return {"rows": rows, "left_out": left_out}


def _contestants(
    case: Case, plan: CollectivesPlan, peers: Peers, communicator: "Communicator"
) -> list[Variant]:
    """Return all ways of doing the collective."""
    payload = Payload(case, mpisgd.rank())
    algorithms = plan.algorithms if case.collective == "all_reduce" else ["auto"]
    remote = [variant for name in peers.running for variant in peers.variants(name, {name: case})]
    return [*_ours(payload, algorithms), _mpis(payload, communicator), *remote]


# -- mpisgd --------------------------------------------------------------------------------------------


def _ours(payload: Payload, algorithms: Iterable[str]) -> Iterator[Timed]:
    """Yield mpisgd's collective, with each algorithm."""
    for algorithm in algorithms:
        name = "mpisgd" if algorithm == "auto" else f"mpisgd {algorithm}"
        yield timed(name, our_call(payload, world(), algorithm), payload, ours=True)


def our_call(payload: Payload, group: Group, algorithm: str = "auto") -> Call:
    """Return what does the collective once over `group`, by mpisgd."""
    return torch_call(mpisgd, payload, group.ranks, group, algorithm=algorithm)


# -- MPI -----------------------------------------------------------------------------------------------


def _mpis(payload: Payload, communicator: "Communicator") -> Variant:
    """Return MPI's own call on the same memory, as lean as mpi4py can make it: nothing is prepared in it."""
    from mpisgd.transport.mpi import ELEMENT_TYPES

    case = payload.case
    if case.reduces and payload.input.dtype not in ELEMENT_TYPES:
        return Timed(MPI_NAME, functools.partial(_refuse, f"MPI has no arithmetic for {case.dtype}"))
    return timed(MPI_NAME, _mpi_call(payload, communicator), payload)


def _refuse(reason: str) -> None:
    raise Unavailable(reason)


def _mpi_call(payload: Payload, communicator: "Communicator") -> Call:
    from mpisgd.transport.mpi import ELEMENT_TYPES, MPI

    def spec(tensor: torch.Tensor, pieces: int = 1) -> list[Any]:
        memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        if payload.case.reduces:
            return [memory, tensor.numel(), ELEMENT_TYPES[tensor.dtype]]
        return [memory, tensor.nbytes // pieces, MPI.BYTE]

    comm, rank, size, next_root = communicator.comm, payload.rank, payload.case.size, payload.next_root
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
