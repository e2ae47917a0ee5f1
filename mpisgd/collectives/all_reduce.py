"""`all_reduce` and its algorithms."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from mpisgd.accelerator.buffers import StagedOutput
from mpisgd.accelerator.runtime import on_device
from mpisgd.arguments import shown
from mpisgd.collectives.algorithms import ALGORITHMS
from mpisgd.collectives.common import direct_of, link_of, operation_on, run, run_in_steps
from mpisgd.collectives.tensor_arguments import check_output
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import HALF_TYPES, ReduceOp, check_op
from mpisgd.errors import InvalidArgument
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.cma.transport import CmaTransport
from mpisgd.transport.device.chunked_pipeline import goes_in_chunks, reduce_in_chunks
from mpisgd.transport.internode.transport import InternodeTransport
from mpisgd.transport.mpi_reduction import for_mpi
from mpisgd.transport.shm import reduction
from mpisgd.transport.shm.transport import ShmTransport
from mpisgd.transport.torch_reduction import for_torch
from mpisgd.tuning import CostModel

__all__ = ["all_reduce", "can_go_direct", "choose_algorithm", "reduce_flat", "reduce_tensor"]

CHOICES: Sequence[str] = ("auto", "mpi", "node", "direct", "hierarchical", *ALGORITHMS)
MAX_KNOWN_CALLS = 1024
ALGORITHM_TEXT = {name: f"algorithm={name}" for name in CHOICES}


def all_reduce(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> Work | None:
    """Combine `tensor` over the group, in place; every rank ends with the same bits.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: any dense tensor, of the CPU or a GPU, of the same shape and dtype on every rank; overwritten.
        op: elementwise combination; AVG is SUM divided by `group.size`.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensor alone until its `wait()`.
        algorithm: `mpi` (MPI_Allreduce), `node` (shared memory, for ranks of one host), `direct` (in each
            other's memory, the same), `hierarchical` (shared memory on each of several hosts, messages
            between them), `ring`, `halving_doubling`, `reduce_broadcast`, `all_to_all`, or `auto`. float16
            and bfloat16 are summed in float32 by all of them and rounded once; `node`, `direct` and
            `all_to_all` move the halves themselves, `hierarchical` float32 on the first half of the way
            between hosts, the others float32. For tensors on a GPU `auto` is NCCL where there is one; any
            other goes through host memory.

    Raises:
        UnsupportedTensor, UnsupportedOp, InvalidArgument: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank, `tensor` is unchanged.

    Cost: see the functions in `mpisgd.collectives.algorithms`.
    """
    group = group_or_world(group)
    check_output("all_reduce", tensor)
    asked = algorithm
    operation, op, algorithm, plane = _call(group, tensor, op, algorithm)
    if asked == "auto" and (direct := direct_of(group, operation, tensor, op=op)) is not None:
        return direct.all_reduce(operation, tensor, op, async_op)
    if plane is not None and not goes_in_chunks(tensor):
        steps = _on_plane(plane, tensor, op)
        return run_in_steps(group, plane, operation, steps, tensors=[tensor], async_op=async_op)

    return run(
        group,
        operation,
        lambda: reduce_tensor(group, tensor, op, algorithm),
        tensors=[tensor],
        async_op=async_op,
        like=tensor,
    )


class _Call(NamedTuple):
    """What is the same whenever tensors of one form are reduced."""

    operation: Operation
    op: ReduceOp
    algorithm: str
    plane: ShmTransport | CmaTransport | InternodeTransport | None


def _call(group: Group, tensor: Tensor, op: ReduceOp, algorithm: str) -> _Call:
    """Check the arguments and find out how to go about it: once, since small messages feel it."""
    key = None
    if type(op) is ReduceOp and type(algorithm) is str:
        key = (tensor.shape, tensor.dtype, on_device(tensor), op, algorithm)
        if (known := group.known_calls.get(key)) is not None:
            return known  # type: ignore[no-any-return]
    op = check_op("all_reduce", op, tensor.dtype)
    algorithm = choose_algorithm(group, algorithm, tensor)
    operation = operation_on("all_reduce", tensor, op=op, extra=ALGORITHM_TEXT[algorithm])
    plane = {
        "node": group.shm,
        "direct": group.transports.cma,
        "hierarchical": group.internode,
    }.get(algorithm)
    call = _Call(operation, op, algorithm, plane)
    if key is not None:
        if len(group.known_calls) >= MAX_KNOWN_CALLS:
            group.known_calls.clear()
        group.known_calls[key] = call
    return call


def _on_plane(
    plane: ShmTransport | CmaTransport | InternodeTransport, tensor: Tensor, op: ReduceOp
) -> Iterator[None]:
    landing = StagedOutput(
        tensor, keep=True
    )  # made when it is our turn: another operation may write it before
    yield from _steps(plane, landing.flat, op)
    landing.settle()


def _steps(
    plane: ShmTransport | CmaTransport | InternodeTransport, flat: Tensor, op: ReduceOp
) -> Iterator[None]:
    return (
        reduction.all_reduce(plane, flat, op)
        if isinstance(plane, ShmTransport)
        else plane.all_reduce(flat, op)
    )


def choose_algorithm(group: Group, algorithm: str, tensor: Tensor) -> str:
    """Return the algorithm to use: the same on every rank for the same size and dtype."""
    if not isinstance(algorithm, str) or algorithm not in CHOICES:
        raise InvalidArgument(
            f"all_reduce: algorithm={shown(algorithm)}; expected one of {', '.join(CHOICES)}"
        )
    if algorithm == "node" and group.shm is None:
        raise InvalidArgument(
            f"all_reduce: algorithm='node' needs shared memory; the {group.size} ranks of group "
            f"'{group.name}' are on {group.topology.num_nodes} host(s) or cannot have it"
        )
    if algorithm == "direct" and not can_go_direct(group):
        raise InvalidArgument(
            f"all_reduce: algorithm='direct' needs ranks on one host that may reach each other's memory; the "
            f"{group.size} ranks of group '{group.name}' are on {group.topology.num_nodes} host(s) or may not"
        )
    if algorithm == "hierarchical" and group.internode is None:
        raise InvalidArgument(
            f"all_reduce: algorithm='hierarchical' needs several hosts; group '{group.name}' has "
            f"{group.topology.num_nodes}, or ranks on one host that cannot share memory"
        )
    if algorithm != "auto":
        return algorithm
    half = tensor.dtype in HALF_TYPES
    costs: CostModel = group.costs
    return costs.choose(_candidates(group, half), tensor.nbytes, half)


def can_go_direct(group: Group) -> bool:
    """Return whether the ranks of a group share one host and can reach each other's memory."""
    return group.transports.cma is not None


def _candidates(group: Group, half: bool) -> tuple[str, ...]:
    """Return what `auto` may take, the best guess first where nothing was measured.

    MPI would get half types as float32, so they go through what adds them by itself.
    """
    if group.shm is not None:
        ours = ("node", "direct") if can_go_direct(group) else ("node",)
        return ours if half else (*ours, "mpi")
    if group.internode is not None:
        return ("hierarchical", "all_to_all") if half else ("hierarchical", "mpi")
    return ("all_to_all",) if half else ("mpi",)


def reduce_tensor(group: Group, tensor: Tensor, op: ReduceOp, algorithm: str) -> None:
    """Combine any tensor over the ranks in place, through the CPU; runs inside the queue."""
    in_chunks = goes_in_chunks(tensor)
    landing = StagedOutput(tensor, keep=True, at_home=in_chunks)
    if in_chunks:
        reduce_in_chunks(landing.flat, lambda chunk: reduce_flat(group, chunk, op, algorithm))
    else:
        reduce_flat(group, landing.flat, op, algorithm)
    landing.settle()


def reduce_flat(group: Group, flat: Tensor, op: ReduceOp, algorithm: str) -> None:
    """Combine contiguous `flat` [n] over the ranks in place; runs inside the queue."""
    if algorithm == "mpi":
        work, name, finish = for_mpi(flat, op, group.size)
        group.queue.wire.all_reduce(work, name)
    elif algorithm in ("node", "direct"):
        plane = group.shm if algorithm == "node" else group.transports.cma
        assert plane is not None
        plane.run_steps(_steps(plane, flat, op))
        return
    elif algorithm == "hierarchical":
        assert group.internode is not None
        group.internode.all_reduce_now(flat, op)
        return
    elif algorithm == "all_to_all":  # sees all pieces at once, so it can add any dtype by itself
        ALGORITHMS[algorithm](link_of(group, "all_reduce"), flat, op)
        return
    else:
        work, arithmetic, finish = for_torch(flat, op, group.size)
        ALGORITHMS[algorithm](link_of(group, "all_reduce"), work, arithmetic)
    result = finish(work)
    if result.data_ptr() != flat.data_ptr():
        flat.copy_(result)
