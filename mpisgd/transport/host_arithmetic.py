"""How a reduction is done in two steps, on each host and then across them, exactly once rounded.

16-bit floats are added in float32 from the first rank to the last: a host's sum stays float32 until it
reaches the rank that finishes the element, and only the result is rounded, and travels, as a half. A rank
that is alone on its host has nothing to add up, and sends halves.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.dtypes import HALF_DTYPES, ReduceOp
from mpisgd.transport.torch_reduction import ADDED_AS_THEY_ARE, COMBINE, Finish, combine, divide, for_torch

__all__ = ["Arithmetic", "prepare"]


class Arithmetic(NamedTuple):
    """One reduction in torch's arithmetic.

    Attributes:
        op: how two numbers become one; never AVG.
        partial: the dtype of what a host sends: its sum, or its only rank's numbers.
        total: the dtype in which the hosts' are added up.
        divisor: what the result is divided by, before it is rounded; 1 for nothing.
    """

    op: ReduceOp
    partial: torch.dtype
    total: torch.dtype
    divisor: int

    def on_host(self, pieces: Sequence[Tensor], out: Tensor) -> None:
        """Combine the pieces [n] of a host's ranks into `out` [n] of `partial`, which overlaps none."""
        first, *rest = pieces
        if out.dtype == first.dtype and rest:
            COMBINE[self.op](first, rest.pop(0), out=out)
        else:
            out.copy_(first)
        for piece in rest:
            combine(self.op, out, piece)

    def across(self, partials: Sequence[Tensor], out: Tensor) -> None:
        """Combine two or more hosts' `partials` [n] into `out` [n], which may be one of them.

        The first of the partials may be overwritten.
        """
        total, last = partials[0], partials[-1]
        if total.dtype != self.total:
            total = total.to(self.total)
        for other in partials[1:-1]:
            combine(self.op, total, other)
        target = out if out.dtype == self.total else total
        COMBINE[self.op](total, last, out=target)
        if self.divisor != 1:
            divide(target, self.divisor)
        if target is not out:
            out.copy_(target)

    def round_off(self, total: Tensor, out: Tensor) -> None:
        """Put a total [n] over all ranks, which others still read, into `out` [n] of any dtype."""
        if self.divisor != 1:
            total = total.clone()
            divide(total, self.divisor)
        out.copy_(total)

    def across_unchanged(self, partials: Sequence[Tensor], out: Tensor) -> None:
        """Do the same where others still read all of the partials, none of which is `out`."""
        if len(partials) > 2 or out.dtype != self.total:
            partials = [partials[0].clone(), *partials[1:]]
        self.across(partials, out)


def prepare(flat: Tensor, op: ReduceOp, size: int, *, alone: bool) -> tuple[Tensor, Arithmetic, Finish]:
    """Return (`flat` [n] in a form that is reduced in place, how, what makes the result of it).

    The first may share memory with `flat`.

    Args:
        flat: of any reducible dtype.
        op: any that the dtype has.
        size: the number of ranks.
        alone: whether every rank is alone on its host, so that 16-bit floats need not be added up there.
    """
    known = _arithmetic(flat.dtype, op, size, alone)
    if known is not None:
        return flat, known, lambda work: work
    work, arithmetic, finish = for_torch(flat, op, size)  # the division, too, needs the other form
    return work, Arithmetic(arithmetic, work.dtype, work.dtype, 1), finish


@functools.cache
def _arithmetic(dtype: torch.dtype, op: ReduceOp, size: int, alone: bool) -> Arithmetic | None:
    """Return how a tensor is reduced as it is, None where it needs another form."""
    plain, divisor = (ReduceOp.SUM, size) if op is ReduceOp.AVG else (op, 1)
    if dtype in HALF_DTYPES:
        return Arithmetic(plain, dtype if alone else torch.float32, torch.float32, divisor)
    return Arithmetic(plain, dtype, dtype, divisor) if dtype in ADDED_AS_THEY_ARE else None
