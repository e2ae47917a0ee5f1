"""Infinities and NaNs in gradients: found where they came up, before a reduction brings them to all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.group import Group
from mpisgd.errors import NonFiniteGradients
from mpisgd.gradients.kinds import NONFINITE, SPARSE

__all__ = ["are_finite", "mark_nonfinite", "raise_for"]

MOST_NAMES = 5


def are_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither infinities nor NaNs; one pass, unless there may be one.

    Either of them makes the sum one. The sum of finite numbers may be one too, so then they are looked at.
    """
    if tensor.is_sparse:
        return are_finite(tensor._values())
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return bool(tensor.sum(dtype=wide).isfinite()) or bool(tensor.isfinite().all())


def mark_nonfinite(kinds: bytes, grads: Sequence[Tensor | None], flat: Tensor) -> bytes:
    """Return the kinds of some gradients with NONFINITE added where it holds; `flat` has the dense ones."""
    if are_finite(flat) and not any(kind & SPARSE for kind in kinds):
        return kinds
    finite = [grad is None or are_finite(grad) for grad in grads]
    return bytes(kind | NONFINITE * (not good) for kind, good in zip(kinds, finite, strict=True))


def raise_for(
    indices: Sequence[int],
    observed: Sequence[int],
    named: Sequence[tuple[str, Tensor]],
    group: Group,
    when: str,
) -> None:
    """Raise on every rank, once it is known that some rank has such gradients. Collective.

    Args:
        indices: of this rank's.
        observed: those of all parameters, in the order in which backward made their gradients.
        named: all parameters.
        group: the ranks.
        when: which reduction of the program it is.
    """
    place = {index: at for at, index in enumerate(observed)}
    names = [named[index][0] for index in sorted(indices, key=lambda index: place.get(index, len(place)))]
    everyones: list[list[str]] = [[]] * group.size
    all_gather_object(everyones, names, group)
    lines = [f"gradients are infinite or NaN ({when}); in the order in which backward made them:"]
    for rank, theirs in zip(group.ranks, everyones, strict=True):
        if theirs:
            more = f" and {len(theirs) - MOST_NAMES} more" if len(theirs) > MOST_NAMES else ""
            lines.append(f"  rank {rank}: {', '.join(theirs[:MOST_NAMES])}{more}")
    raise NonFiniteGradients("\n".join(lines))
