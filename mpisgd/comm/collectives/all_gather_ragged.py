"""`all_gather_ragged`: everyone gets everyone's tensor, whose first dimension may differ by rank."""

import torch
from torch import Tensor

from mpisgd.comm.buffers import check_tensor, dtype_name, readable
from mpisgd.comm.collectives.common import link_of
from mpisgd.comm.group import Group
from mpisgd.comm.handshake import Operation
from mpisgd.comm.job import group_or_world
from mpisgd.errors import ShapeMismatch

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

    Cost: sends the tensor (group.size - 1) times, after an all-gather of one integer.
    """
    group = group_or_world(group)
    check_tensor("all_gather_ragged", tensor)
    if tensor.dim() == 0:
        raise ShapeMismatch(
            "all_gather_ragged: the tensor has no dimension that could differ; use all_gather"
        )
    row_shape = tuple(tensor.shape[1:])
    pieces: list[Tensor] = []

    def action() -> None:
        rows = torch.empty(group.size, dtype=torch.int64)
        group.lane.wire.all_gather(rows, torch.tensor([tensor.shape[0]]))
        mine = readable(tensor)
        pieces.extend(torch.empty((num, *row_shape), dtype=tensor.dtype) for num in rows.tolist())
        pieces[group.rank].view(-1).copy_(mine)
        others = [rank for rank in range(group.size) if rank != group.rank]
        link_of(group, "all_gather_ragged").transfer(
            sends=[(rank, mine) for rank in others],
            receives=[(rank, pieces[rank].view(-1)) for rank in others],
        )

    group.lane.run(Operation("all_gather_ragged", dtype=dtype_name(tensor.dtype), shape=row_shape), action)
    return pieces
