"""From a call of an operation to an entry of the engine: names, checks that need no other rank."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mpisgd.arguments import shown
from mpisgd.collectives.tensor_arguments import check_output, check_tensor
from mpisgd.dtypes import dtype_name
from mpisgd.horovod import state
from mpisgd.horovod.arguments import as_number, check_name
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.ops import handles
from mpisgd.horovod.process_sets import ProcessSet
from mpisgd.job.rank_info import rank

__all__ = ["make_request", "set_id_of_member", "submit"]

OF_ROWS = ("allgather", "alltoall", "reducescatter")
RAGGED = ("allgather", "alltoall")  # of which ranks may have different numbers of rows


def make_request(
    kind: str,
    name: str | None,
    tensors: Sequence[Tensor],
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    **more: Any,
) -> Request:
    """Describe an operation to the other ranks.

    Args:
        kind: of operation; the name the ranks know it by begins with it.
        name: the user's; None: it is the next one without a name in its process set.
        tensors: of this rank.
        process_set: where it runs.
        in_place: whether the tensors will be overwritten.
        more: other fields of the request.

    Raises:
        UnsupportedTensor: a tensor that cannot travel.
        ValueError: this rank is not in the process set, a tensor without dimensions has no rows, or a name
            or a factor is none.
    """
    check_name(kind, name)
    for what in ("prescale", "postscale"):
        if what in more:
            more[what] = as_number(kind, f"{what}_factor", more[what])
    set_id = set_id_of_member(kind, process_set)
    check = check_output if in_place else check_tensor
    for tensor in tensors:
        check(kind, tensor)
        if kind in OF_ROWS and tensor.dim() == 0:
            raise ValueError(f"{kind}: the tensor has no dimension; expected at least one")
    return Request(
        "" if name is None else f"{kind}.{name}",
        kind,
        set_id,
        dtypes=tuple(dtype_name(tensor.dtype) for tensor in tensors),
        shapes=tuple(tuple(tensor.shape[kind in RAGGED :]) for tensor in tensors),
        device=tensors[0].device.type if tensors else "cpu",
        **more,
    )


def set_id_of_member(kind: str, process_set: ProcessSet) -> int:
    """Return the number of a process set.

    Raises:
        ValueError: it is none, was not added, or this rank is not in it.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"{kind}: process_set={shown(process_set)}; expected an hvd.ProcessSet")
    set_id = process_set.process_set_id
    members = None if set_id is None else state.engine().process_sets.members.get(set_id)
    if set_id is None or members is None:
        raise ValueError(f"{kind}: Process set provided does not exist, or has not been registered.")
    if rank() not in members:
        raise ValueError(f"{kind}: Rank {rank()} is not a member of the provided process set.")
    return set_id


def submit(entry: Entry) -> int:
    """Hand an entry to the engine, and return its handle."""
    return handles.keep(state.engine().submit(entry))
