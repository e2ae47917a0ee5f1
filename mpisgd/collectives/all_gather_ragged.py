"""`all_gather_ragged`: everyone gets everyone's tensor, whose first dimension may differ by rank."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mpisgd.collectives.dispatch import Call, Collective, device_kind, run
from mpisgd.collectives.tensor_arguments import check_tensor
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.dtypes import dtype_name
from mpisgd.errors import ShapeMismatch
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.shm import data_movement
from mpisgd.transport.shm.staging import equal_ranges, range_of
from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["all_gather_ragged"]


def all_gather_ragged(tensor: Tensor, group: Group | None = None) -> list[Tensor]:
    """Return the tensors of all ranks in rank order; only their number of rows may differ.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: [rows of this rank, ...]; the dtype and the other dimensions are alike on all ranks.
        group: defaults to all processes of the job.

    Raises:
        UnsupportedTensor, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: a rank gave another dtype or other trailing dimensions; raised on every rank.

    Cost: after an all-gather of one integer, goes through shared memory on one host; else sends the tensor
        (group.size - 1) times.
    """
    group = group_or_world(group)
    check_tensor("all_gather_ragged", tensor)
    if tensor.dim() == 0:
        raise ShapeMismatch(
            "all_gather_ragged: the tensor has no dimension that could differ; use all_gather"
        )
    row_shape = tuple(tensor.shape[1:])
    operation = Operation(
        "all_gather_ragged", dtype=dtype_name(tensor.dtype), shape=row_shape, device=device_kind(tensor)
    )
    pieces: list[Tensor] = []  # filled when their sizes are known
    run(ALL_GATHER_RAGGED, Call(group, operation, pieces, [tensor]), async_op=False)
    return [piece.to(tensor.device) for piece in pieces]


def _mpi(call: Call) -> None:
    (tensor,), size, me = call.inputs, call.group.size, call.group.rank
    rows = torch.empty(size, dtype=torch.int64)
    call.communicator.all_gather(rows, torch.tensor(tensor.shape[:1]))
    mine, pieces = call.read(tensor), _room(rows, tensor)
    pieces[me].view(-1).copy_(mine)
    others = [rank for rank in range(size) if rank != me]
    call.link.transfer(
        sends=[(rank, mine) for rank in others],
        receives=[(rank, pieces[rank].view(-1)) for rank in others],
    )
    call.outputs += pieces


def _shm(call: Call, shm: ShmTransport) -> Iterator[None]:
    (tensor,), size = call.inputs, call.group.size
    rows, mine = torch.empty(size, dtype=torch.int64), torch.tensor(tensor.shape[:1])
    yield from data_movement.all_gather(shm, equal_ranges(rows, size), range_of(mine))
    mine, pieces = call.read(tensor), _room(rows, tensor)
    yield from data_movement.all_gather(shm, [range_of(piece) for piece in pieces], range_of(mine))
    call.outputs += pieces


def _room(rows: Tensor, tensor: Tensor) -> list[Tensor]:
    """Return uninitialized tensors like `tensor`, of as many rows as everyone has."""
    return [torch.empty((num, *tensor.shape[1:]), dtype=tensor.dtype) for num in rows.tolist()]


ALL_GATHER_RAGGED = Collective("all_gather_ragged", _mpi, _shm)
