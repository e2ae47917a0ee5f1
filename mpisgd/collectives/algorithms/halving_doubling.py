"""Halving and doubling: as few bytes as the ring, in a logarithmic number of steps.

Partners exchange halves of what they are still responsible for (halving), until each rank holds one finished
piece; the same steps backwards (doubling) put the pieces together again. Ranks beyond a power of two hand
their tensor to a partner first and get the result from it at the end.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.transport.messages.link import Link, frames
from mpisgd.transport.torch_reduction import combine

__all__ = ["halving_doubling", "sum_along_tree"]


def halving_doubling(link: Link, flat: Tensor, op: ReduceOp) -> None:
    """Combine `flat` [n] over the ranks, in place.

    Cost: with p the largest power of two <= size, and extra = size - p: the ranks that do the exchanging
    send 2 (p - 1) / p * n elements in 2 log2(p) messages, plus n in one more where they serve an extra rank;
    the extra ranks send n in one message.
    Source: Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005.
    """
    power = 1 << (link.size.bit_length() - 1)
    extra = link.size - power
    if link.rank >= power:  # an extra rank: its partner does the work
        link.send(flat, link.rank - power)
        link.recv(flat, link.rank - power)
        return
    if link.rank < extra:
        theirs = torch.empty_like(flat)
        link.recv(theirs, link.rank + power)
        combine(op, flat, theirs)
    _halve_and_double(link, flat, op, power)
    if link.rank < extra:
        link.send(flat, link.rank + power)


def sum_along_tree(
    link: Link, flat: Tensor, finish: Callable[[Tensor], None], *, framed: bool = False
) -> None:
    """Add up `flat` [n] over a power of two of ranks along one binary tree, in place.

    Neighbours first: of 4 ranks (x0 + x1) + (x2 + x3), element by element. The two subtrees of a rank's are
    those of half as many ranks, so the result is that of half as many ranks with twice as many summands each.
    16-bit floats are rounded after every addition.

    Args:
        link: to the other ranks.
        flat: of a dtype that torch adds.
        finish: called with the sums of which this rank is the owner, before the others get them.
        framed: cut messages such that those that cross each other between hosts need not take turns.

    Cost: sends 2 (size - 1) / size * n elements in 2 log2(size) messages, if these are not cut.
    """
    distances = [1 << i for i in range(link.size.bit_length() - 1)]
    owned, history = _halve(link, flat, ReduceOp.SUM, distances, framed=framed)
    finish(flat[slice(*owned)])
    _double(link, flat, owned, history, framed=framed)


Span = tuple[int, int]


def _halve_and_double(link: Link, flat: Tensor, op: ReduceOp, power: int) -> None:
    """All-reduce among the first `power` ranks, the farthest first."""
    distances = [1 << i for i in reversed(range(power.bit_length() - 1))]
    _double(link, flat, *_halve(link, flat, op, distances))


def _halve(
    link: Link, flat: Tensor, op: ReduceOp, distances: Sequence[int], *, framed: bool = False
) -> tuple[Span, list[tuple[int, Span]]]:
    """Reduce-scatter; return what this rank owns then, and to which rank it has given what."""
    start, stop = 0, flat.numel()
    history: list[tuple[int, Span]] = []
    for distance in distances:
        partner, middle = link.rank ^ distance, (start + stop) // 2
        keep = (start, middle) if link.rank < partner else (middle, stop)
        give = (middle, stop) if link.rank < partner else (start, middle)
        theirs = flat.new_empty(keep[1] - keep[0])
        _exchange(link, flat[slice(*give)], theirs, partner, framed=framed)
        combine(op, flat[slice(*keep)], theirs)
        history.append((partner, give))
        start, stop = keep
    return (start, stop), history


def _double(
    link: Link, flat: Tensor, owned: Span, history: Sequence[tuple[int, Span]], *, framed: bool = False
) -> None:
    """All-gather what ranks own after `_halve`."""
    start, stop = owned
    for partner, give in reversed(history):
        _exchange(link, flat[start:stop], flat[slice(*give)], partner, framed=framed)
        start, stop = min(start, give[0]), max(stop, give[1])


def _exchange(link: Link, mine: Tensor, theirs: Tensor, partner: int, *, framed: bool) -> None:
    if framed:
        sends, receives = ([(partner, part) for part in frames(whole)] for whole in (mine, theirs))
        link.transfer(sends, receives)
    else:
        link.exchange(mine, partner, theirs, partner)
