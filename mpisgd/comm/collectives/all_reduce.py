"""`all_reduce` and its algorithms."""

from collections.abc import Sequence

from torch import Tensor

from mpisgd.comm.algorithms import ALGORITHMS
from mpisgd.comm.buffers import Landing, check_output
from mpisgd.comm.collectives.common import link_of, operation_on
from mpisgd.comm.dtypes import HALF_TYPES, ReduceOp, check_op, for_mpi, for_torch
from mpisgd.comm.group import Group
from mpisgd.comm.job import group_or_world
from mpisgd.comm.work import Work
from mpisgd.errors import InvalidArgument

__all__ = ["all_reduce", "choose_algorithm", "reduce_flat"]

CHOICES: Sequence[str] = ("auto", "mpi", "node", *ALGORITHMS)
# Below this MPI's own all-reduce of a few microseconds wins over the copies and barriers of the node plane.
NODE_BYTES = 512 * 2**10


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
        tensor: any dense CPU tensor of the same shape and dtype on every rank; overwritten.
        op: elementwise combination; AVG is SUM divided by `group.size`.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensor alone until its `wait()`.
        algorithm: `mpi` (MPI_Allreduce), `node` (shared memory, for ranks of one host), `ring`,
            `halving_doubling`, `reduce_broadcast`, `all_to_all`, or `auto`. float16 and bfloat16 are summed
            in float32 by all of them; `node` and `all_to_all` round once and move the halves themselves,
            the others send float32.

    Raises:
        UnsupportedTensor, UnsupportedOp, InvalidArgument: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank, `tensor` is unchanged.

    Cost: see the functions in `mpisgd.comm.algorithms`.
    """
    group = group_or_world(group)
    check_output("all_reduce", tensor)
    op = check_op("all_reduce", op, tensor.dtype)
    algorithm = choose_algorithm(group, algorithm, tensor)

    def action() -> None:
        landing = Landing(tensor, keep=True)  # not before it is our turn: another operation may write it
        reduce_flat(group, landing.flat, op, algorithm)
        landing.settle()

    operation = operation_on("all_reduce", tensor, op=op, extra=f"algorithm={algorithm}")
    return group.lane.run(operation, action, tensors=[tensor], async_op=async_op)


def choose_algorithm(group: Group, algorithm: str, tensor: Tensor) -> str:
    """Return the algorithm to use: the same on every rank for the same size and dtype."""
    if algorithm not in CHOICES:
        raise InvalidArgument(f"all_reduce: algorithm={algorithm!r}; expected one of {', '.join(CHOICES)}")
    if algorithm == "node" and group.plane is None:
        raise InvalidArgument(
            f"all_reduce: algorithm='node' needs shared memory; the {group.size} ranks of group "
            f"'{group.name}' are on {group.topology.num_nodes} host(s) or cannot have it"
        )
    if algorithm != "auto":
        return algorithm
    if group.plane is not None and (tensor.nbytes >= NODE_BYTES or tensor.dtype in HALF_TYPES):
        return "node"
    return "all_to_all" if tensor.dtype in HALF_TYPES else "mpi"


def reduce_flat(group: Group, flat: Tensor, op: ReduceOp, algorithm: str) -> None:
    """Combine contiguous `flat` [n] over the ranks in place; runs inside the lane."""
    if algorithm == "mpi":
        work, name, finish = for_mpi(flat, op, group.size)
        group.lane.wire.all_reduce(work, name)
    elif algorithm == "node":
        assert group.plane is not None
        group.plane.all_reduce(flat, op)
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
