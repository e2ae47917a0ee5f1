"""`all_gather_ragged`: everyone gets everyone's tensor, whose first dimension may differ by rank."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import readable
from mpisgd.collectives.common import device_word, link_of, run, run_in_steps
from mpisgd.collectives.dispatch import shm_transport
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
        "all_gather_ragged", dtype=dtype_name(tensor.dtype), shape=row_shape, device=device_word(tensor)
    )
    pieces: list[Tensor] = []
    if (plane := shm_transport(group, "all_gather_ragged")) is not None:
        steps = _on_node(plane, pieces, tensor)
        run_in_steps(group, plane, operation, steps, tensors=[], async_op=False, like=tensor)
        return [piece.to(tensor.device) for piece in pieces]

    def action() -> None:
        rows = torch.empty(group.size, dtype=torch.int64)
        group.queue.wire.all_gather(rows, torch.tensor([tensor.shape[0]]))
        mine = readable(tensor)
        pieces.extend(_room(rows, tensor))
        pieces[group.rank].view(-1).copy_(mine)
        others = [rank for rank in range(group.size) if rank != group.rank]
        link_of(group, "all_gather_ragged").transfer(
            sends=[(rank, mine) for rank in others],
            receives=[(rank, pieces[rank].view(-1)) for rank in others],
        )

    run(group, operation, action, tensors=[], async_op=False, like=tensor)
    return [piece.to(tensor.device) for piece in pieces]


def _on_node(plane: ShmTransport, pieces: list[Tensor], tensor: Tensor) -> Iterator[None]:
    rows, mine = torch.empty(plane.size, dtype=torch.int64), torch.tensor(tensor.shape[:1])
    yield from data_movement.all_gather(plane, equal_ranges(rows, plane.size), range_of(mine))
    pieces.extend(_room(rows, tensor))
    mine = readable(tensor)
    yield from data_movement.all_gather(plane, [range_of(piece) for piece in pieces], range_of(mine))


def _room(rows: Tensor, tensor: Tensor) -> list[Tensor]:
    """Return uninitialized tensors like `tensor`, of as many rows as everyone has."""
    return [torch.empty((num, *tensor.shape[1:]), dtype=tensor.dtype) for num in rows.tolist()]
