"""`make_means`: what each rank has of its own in the state of parameters, and is saved as its mean."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.methods.compressed_momentum.moments import Trained

__all__ = ["combine", "make_means"]


@torch.no_grad()
def make_means(names: Sequence[str], parameters: Sequence[Trained], group: Group, *, made: bool) -> bool:
    """Let all ranks that have these entries have the mean of them; return whether they have it. Collective.

    Where some have loaded a state since their last step and others have not, all keep what they have.

    Args:
        names: of the entries.
        parameters: all of them, with their state.
        group: the ranks.
        made: whether this rank has the mean already, as after a load.
    """
    entries = [(param, state, name) for param, state, _ in parameters for name in names]
    have = [int(name in state) for _, state, name in entries]
    counts = torch.tensor([int(any(have) and not made), int(any(have)), *have])
    all_reduce(counts, ReduceOp.SUM, group)
    num_apart, num_with, *num_have = counts.tolist()
    if not num_apart or num_apart < num_with:
        return made
    summed = [(entry, count) for entry, count in zip(entries, num_have, strict=True) if count]
    sums = [state[name] if name in state else torch.zeros_like(param) for (param, state, name), _ in summed]
    combine(sums, ReduceOp.SUM, group)
    for tensor, (_, count) in zip(sums, summed, strict=True):
        tensor.div_(count)
    return any(map(bool, have))


def combine(tensors: Sequence[Tensor], op: ReduceOp, group: Group) -> None:
    """Combine tensors, also such as do not lie in the order of their elements. Collective."""
    dense = [tensor.contiguous() for tensor in tensors]
    all_reduce_coalesced(dense, op, group)
    for tensor, combined in zip(tensors, dense, strict=True):
        if tensor is not combined:
            tensor.copy_(combined)
