"""Clipping by the norm of all gradients, of which each rank has those of its own parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.core.group import Group
from mpisgd.sharding.shared_parameters import SharedParameters

__all__ = ["clip_grad_norm_"]

TINY = 1e-6  # as torch adds to the norm it divides by


def clip_grad_norm_(
    params: Sequence[Tensor],
    shared: SharedParameters,
    group: Group,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale all gradients such that their norm is at most `max_norm`. Collective.

    The norm of each gradient comes from its owner; all ranks, also those of other hosts, then do the same
    with the same numbers, as one process does.

    Returns:
        The norm before, in float64, the same on every rank.

    Raises:
        RuntimeError: it is not finite, where that is asked for; raised on every rank, nothing is scaled.
    """
    own = {i: p.grad for i, p in enumerate(params) if p.grad is not None and shared.owns(p)}
    mine = torch.zeros(len(params), dtype=torch.float64)  # the norm of each gradient, 0 where there is none
    if own:
        norms = torch._foreach_norm(list(own.values()), norm_type)
        mine[list(own)] = torch.stack([norm.double() for norm in norms])
    everyones = torch.empty(group.size, len(params), dtype=torch.float64)
    all_gather_into_tensor(everyones.view(-1), mine, group)
    of_owners = everyones[shared.group_ranks, torch.arange(len(params))]
    total: Tensor = torch.linalg.vector_norm(of_owners, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. To "
            "scale them anyway, set error_if_nonfinite=False"
        )
    factor = torch.clamp(max_norm / (total + TINY), max=1.0)
    if own:
        torch._foreach_mul_(list(own.values()), factor)
    return total
