"""What reducers send besides sums: gathers and an exchange of pieces, inside the turn of the group's queue.

The ranks have agreed on the operation that a reducer is a part of, so these functions compare nothing. On one
host the data moves through shared memory, else by MPI's all-gather or by messages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.collectives.dispatch import link_of, transport_for
from mpisgd.core.group import Group
from mpisgd.memory_ranges import equal_ranges, range_of

__all__ = ["all_to_all", "gather", "gather_numbers", "gather_ragged"]

KIND = "gradients"


def gather(mine: Tensor, group: Group) -> Tensor:
    """Return everyone's `mine` [n], of the same size on all ranks, as [group.size, n] on the same device."""
    device, mine = mine.device, mine.contiguous().cpu()
    out = torch.empty(group.size, mine.numel(), dtype=mine.dtype)
    if not mine.numel():
        return out.to(device)
    transport = transport_for(group, "all_gather", None, out.nbytes, tuned=True)
    if transport is None:
        group.queue.communicator.all_gather(out.view(-1), mine)
    else:
        transport.run_steps(transport.all_gather(equal_ranges(out, group.size), range_of(mine)))
    return out.to(device)


def gather_numbers(numbers: Sequence[int], group: Group) -> list[list[int]]:
    """Return everyone's numbers, of which all ranks have equally many, by rank."""
    gathered: list[list[int]] = gather(torch.tensor(numbers, dtype=torch.int64), group).tolist()
    return gathered


def gather_ragged(mine: Tensor, lengths: Sequence[int], group: Group) -> list[Tensor]:
    """Return everyone's `mine` [lengths[this rank]] by rank, on the device of `mine`.

    Args:
        mine: this rank's.
        lengths: of everyone's, known to all.
        group: the ranks.
    """
    device, me, mine = mine.device, group.rank, mine.contiguous().cpu()
    pieces = [torch.empty(length, dtype=mine.dtype) for length in lengths]
    transport = transport_for(group, "all_gather", None, sum(piece.nbytes for piece in pieces))
    if transport is not None:
        transport.run_steps(transport.all_gather([range_of(piece) for piece in pieces], range_of(mine)))
    else:
        pieces[me] = mine
        others = [rank for rank in range(group.size) if rank != me]
        link_of(group, KIND).transfer(
            sends=[(rank, mine) for rank in others], receives=[(rank, pieces[rank]) for rank in others]
        )
    return [piece.to(device) for piece in pieces]


def all_to_all(pieces: Sequence[Tensor], lengths: Sequence[Sequence[int]], group: Group) -> list[Tensor]:
    """Send `pieces[r]` to rank r; return what comes from each rank, on the device of the pieces.

    Args:
        pieces: one for each rank, of one dtype.
        lengths: `lengths[src][dst]`, in elements, known to all.
        group: the ranks.
    """
    device, me = pieces[0].device, group.rank
    mine = [piece.contiguous().cpu() for piece in pieces]
    taken = [torch.empty(row[me], dtype=mine[0].dtype) for row in lengths]
    transport = transport_for(group, "all_to_all", None, 0)
    if transport is not None:
        sizes = [[length * mine[0].element_size() for length in row] for row in lengths]
        outputs, inputs = [range_of(piece) for piece in taken], [range_of(piece) for piece in mine]
        transport.run_steps(transport.all_to_all(outputs, inputs, sizes))
    else:
        taken[me] = mine[me]
        others = [rank for rank in range(group.size) if rank != me]
        link_of(group, KIND).transfer(
            sends=[(rank, mine[rank]) for rank in others], receives=[(rank, taken[rank]) for rank in others]
        )
    return [piece.to(device) for piece in taken]
