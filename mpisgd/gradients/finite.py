"""Infinities and NaNs in gradients: found where they came up, before a reduction brings them to all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.group import Group
from mpisgd.errors import NonFiniteGradients
from mpisgd.gradients.gradient_flags import NONFINITE, SPARSE, FlagsExchange

__all__ = ["LateMarks", "are_finite", "mark_late", "mark_nonfinite", "raise_for"]

MOST_NAMES = 5


def are_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither infinities nor NaNs; one pass, unless there may be one.

    Either of them makes the sum one. The sum of finite numbers may be one too, so then they are looked at.
    """
    if tensor.is_sparse:
        return are_finite(tensor._values())
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    return bool(tensor.sum(dtype=wide).isfinite()) or bool(tensor.isfinite().all())


def mark_nonfinite(flags: bytes, grads: Sequence[Tensor | None], flat: Tensor) -> bytes:
    """Return the flags of some gradients with NONFINITE added where it holds; `flat` has the dense ones."""
    if are_finite(flat) and not any(flag & SPARSE for flag in flags):
        return flags
    finite = [grad is None or are_finite(grad) for grad in grads]
    return bytes(flag | NONFINITE * (not good) for flag, good in zip(flags, finite, strict=True))


class LateMarks:
    """Which gradients of a bucket on a device are not finite, as the device will know; nobody waits for it.

    Made before the bucket is sent, for a reduction in place brings them to all.

    Args:
        grads: of the bucket.
    """

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self._sparse = [i for i, grad in enumerate(grads) if grad is not None and grad.is_sparse]
        self._bad_sparse = [i for i in self._sparse if not are_finite(grads[i])]  # type: ignore[arg-type]
        dense = {i: g for i, g in enumerate(grads) if g is not None and not g.is_sparse and g.numel()}
        self.places = list(dense)
        reals = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in dense.values()]
        # The largest magnitude is finite where all are, and a NaN is the largest of all.
        norms = torch._foreach_norm(reals, float("inf")) if reals else ()
        self.on_device = torch.stack(norms).isfinite().logical_not() if norms else None

    def bad(self, found: Sequence[bool]) -> list[int]:
        """Return the places of those that are not finite; `found`: the values of `on_device`."""
        return [*self._bad_sparse, *(place for place, bad in zip(self.places, found, strict=True) if bad)]


def mark_late(late: Sequence[tuple[FlagsExchange, LateMarks]]) -> None:
    """Add NONFINITE to flags that are still to be exchanged; the host waits once for each device."""
    found = iter(_on_host([each.on_device for _, each in late if each.on_device is not None]))
    for exchange, each in late:
        for place in each.bad([] if each.on_device is None else next(found)):
            exchange.mark(place, NONFINITE)


def _on_host(tensors: Sequence[Tensor]) -> list[list[bool]]:
    values: dict[torch.device, list[bool]] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        values[device] = torch.cat([tensor for tensor in tensors if tensor.device == device]).tolist()
    lists = []
    for tensor in tensors:
        here = values[tensor.device]
        lists.append(here[: tensor.numel()])
        values[tensor.device] = here[tensor.numel() :]
    return lists


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
