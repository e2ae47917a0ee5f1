"""`bench collectives`: mpisgd's beside MPI's own calls, other frameworks, and what memory or link allow."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import mpisgd
from mpisgd.core.group import Group
from mpisgd.job.lifecycle import world
from mpisgd.tools.bench.cases import Case, case_of
from mpisgd.tools.bench.hardware_limits import bounds, keep_faster_limit
from mpisgd.tools.bench.measure import Pace, Timed, Unavailable, Variant, measure
from mpisgd.tools.bench.network import open_ring
from mpisgd.tools.bench.payload import Payload, torch_call
from mpisgd.tools.bench.peers.remote import Peers
from mpisgd.tools.bench.report.rows import as_bytes, collective_rows

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["CollectivesPlan", "device_notes", "run_collectives"]

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
        device: what torch calls the kind of device on which the tensors lie.
    """

    collectives: Sequence[str]
    sizes: Sequence[int]
    dtypes: Sequence[str]
    algorithms: Sequence[str]
    pace: Pace
    device: str = "cpu"

    def cases(self, size: int) -> list[Case]:
        """Return every case, each once although small sizes may round up to the same."""
        every = itertools.product(self.collectives, self.dtypes, self.sizes)
        return list(dict.fromkeys(case_of(*what, size, self.device) for what in every))


def run_collectives(
    plan: CollectivesPlan, peers: Peers, report: Callable[[str, Any], None]
) -> dict[str, Any]:
    """Measure the cases of `plan`; return rows, and what was left out. Collective."""
    from mpisgd.transport.mpi import as_mpi

    communicator = as_mpi(world().queue.communicator).duplicate()
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
    return {"rows": rows, "left_out": left_out, "device": plan.device, "notes": device_notes(plan.device)}


def device_notes(device: str) -> list[str]:
    """Return the backend of the world's device tensors, and the name of the GPU; nothing for the CPU."""
    if device == "cpu" or world().device is None:
        return []
    return [f"tensors on a GPU, by {world().device.selection.name}"]


def _contestants(
    case: Case, plan: CollectivesPlan, peers: Peers, communicator: "Communicator"
) -> list[Variant]:
    """Return all ways of doing the collective."""
    payload = Payload(case, mpisgd.rank())
    algorithms = plan.algorithms if case.collective == "all_reduce" else ["auto"]
    names = ["mpisgd" if algorithm == "auto" else f"mpisgd {algorithm}" for algorithm in algorithms]
    return [
        *(
            Timed(name, our_call(payload, world(), algorithm), payload, ours=True)
            for name, algorithm in zip(names, algorithms, strict=True)
        ),
        *([Timed("MPI", _mpi_call(payload, communicator), payload)] if case.device == "cpu" else []),
        *(variant for name in peers.running for variant in peers.variants(name, {name: case})),
    ]


def our_call(payload: Payload, group: Group, algorithm: str = "auto") -> Call:
    """Return a function that runs the collective once over `group`, by mpisgd."""
    return torch_call(mpisgd, payload, group.ranks, group, algorithm=algorithm)


def _mpi_call(payload: Payload, communicator: "Communicator") -> Call:
    """Return MPI's own call on the same memory, as lean as mpi4py can make it: nothing is prepared in it."""
    from mpisgd.transport.mpi import ELEMENT_TYPES, MPI

    if payload.case.reduces and payload.input.dtype not in ELEMENT_TYPES:

        def refuse() -> None:
            raise Unavailable(f"MPI has no arithmetic for {payload.case.dtype}")

        return refuse

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
