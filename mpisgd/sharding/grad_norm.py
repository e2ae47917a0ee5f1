"""Clipping by the norm of all gradients, of which each rank has those of its pieces."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import on_host
from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.core.group import Group

__all__ = ["clip_factor", "clip_grad_norm_"]

TINY = 1e-6  # as torch adds to the norm it divides by


def clip_grad_norm_(
    grads: list[Tensor],
    scaled: list[Tensor],
    owners: Sequence[int],
    group: Group,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale all gradients such that their norm is at most `max_norm`. Collective.

    The norms of the pieces of one host make up that of all; every rank, also those of other hosts, then does
    the same with the same number.

    Args:
        grads: of this rank's pieces.
        scaled: where these come from, which `grads` may be copies of; multiplied in place.
        owners: the ranks of the group whose pieces are everything, once.
        group: the ranks.
        max_norm: see `DistributedOptimizer.clip_grad_norm_`.
        norm_type: likewise.
        error_if_nonfinite: likewise.

    Returns:
        The norm before, in float64, the same on every rank.

    Raises:
        RuntimeError: it is not finite, where that is asked for, or a gradient without elements has no norm of
            this order, as in torch; raised on every rank, nothing is scaled.
    """
    norms: Sequence[Tensor] | RuntimeError
    try:
        norms = torch._foreach_norm(grads, norm_type) if grads else []
    except RuntimeError as exc:
        norms = exc
    total, factor = clip_factor(norms, owners, group, max_norm, norm_type, error_if_nonfinite)
    if scaled:
        torch._foreach_mul_(scaled, factor)
    return total


def clip_factor(
    norms: Sequence[Tensor] | RuntimeError,
    owners: Sequence[int],
    group: Group,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> tuple[Tensor, Tensor]:
    """Return the norm of all gradients and what they are to be multiplied by; see `clip_grad_norm_`.

    Args:
        norms: of this rank's pieces; or why they have none, which every rank raises.
    """
    everyones = torch.empty(group.size, dtype=torch.float64)
    all_gather_into_tensor(everyones, _norm_here(norms, norm_type).view(1), group)
    if (everyones < 0).any():
        failed = [group.ranks[rank] for rank in (everyones < 0).nonzero().flatten().tolist()]
        cause = norms if isinstance(norms, RuntimeError) else None
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of a gradient without elements is not defined; "
            f"there is one on rank(s) {', '.join(map(str, failed))}"
        ) from cause
    total: Tensor = torch.linalg.vector_norm(everyones[list(owners)], norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped. To "
            "scale them anyway, set error_if_nonfinite=False"
        )
    return total, torch.clamp(max_norm / (total + TINY), max=1.0)


def _norm_here(norms: Sequence[Tensor] | RuntimeError, norm_type: float) -> Tensor:
    """Return the norm of this rank's pieces, in float64; -1 where they have none."""
    if isinstance(norms, RuntimeError):
        return torch.full((), -1.0, dtype=torch.float64)
    device = norms[0].device if norms else torch.device("cpu")
    mine = [torch.zeros((), dtype=torch.float64, device=device), *(norm.double() for norm in norms)]
    return on_host(torch.linalg.vector_norm(torch.stack(mine), norm_type))
