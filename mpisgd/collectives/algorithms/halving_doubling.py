"""Halving and doubling: as few bytes as the ring, in a logarithmic number of steps.

Partners exchange halves of what they are still responsible for (halving), until each rank holds one finished
piece; the same steps backwards (doubling) put the pieces together again. Ranks beyond a power of two hand
their tensor to a partner first and get the result from it at the end.
"""

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.transport.messages.link import Link
from mpisgd.transport.torch_reduction import combine

__all__ = ["halving_doubling"]


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


def _halve_and_double(link: Link, flat: Tensor, op: ReduceOp, power: int) -> None:
    """All-reduce among the first `power` ranks."""
    start, stop = 0, flat.numel()
    history: list[tuple[int, int, int]] = []
    distance = power // 2
    while distance:
        partner, middle = link.rank ^ distance, (start + stop) // 2
        keep = (start, middle) if link.rank < partner else (middle, stop)
        give = (middle, stop) if link.rank < partner else (start, middle)
        theirs = flat.new_empty(keep[1] - keep[0])
        link.exchange(flat[slice(*give)], partner, theirs, partner)
        combine(op, flat[slice(*keep)], theirs)
        history.append((partner, *give))
        start, stop = keep
        distance //= 2
    for partner, give_start, give_stop in reversed(history):
        link.exchange(flat[start:stop], partner, flat[give_start:give_stop], partner)
        start, stop = min(start, give_start), max(stop, give_stop)
