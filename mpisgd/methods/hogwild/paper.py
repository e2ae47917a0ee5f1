"""Hogwild: all ranks update one copy of the parameters, and nobody waits or locks anything.

Recht, Re, Wright and Niu 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent",
algorithm 1, with all elements of a gradient instead of a random one of them; x is in shared memory.

    step, of rank i, for every element v of g_i     read x_v;   x_v <- what was read + u_iv

u is the update of rank i's optimizer; a dense gradient has all elements, also where it is 0. Of two ranks
that have both read before either writes, what is written first is lost. So nothing says which parameters a
run comes to, and there is no run to repeat. What holds of every one, of its updates u and of x at the start
and the end, where u does not depend on x but by the gradient:

    alone      what one rank alone updates has each of its updates, once, in their order
    bounded    start + sum of min(u, 0) <= x <= start + sum of max(u, 0): no update counts twice
    last       an element has at least one of its updates: the one that was written last
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpisgd.methods.paper_kit import Vec

__all__ = ["violated"]


def violated(start: Vec, end: Vec, u: Mapping[int, Sequence[Vec]], close: float = 0.0) -> list[str]:
    """Return which of the properties do not hold, each with the parameter.

    Args:
        start: x before all updates.
        end: x after all of them.
        u: the updates of each rank, in its order; an absent name is one that it did not update.
        close: how far an element may be beyond the bounds, by roundings.
    """
    found = []
    for name, x in start.items():
        mine = {i: [one[name] for one in some if name in one] for i, some in u.items()}
        everything = [one for some in mine.values() for one in some]
        low, high = (
            _after(x, [one.clamp(**limit) for one in everything]) for limit in ({"max": 0}, {"min": 0})
        )
        if not bool(((low - close <= end[name]) & (end[name] <= high + close)).all()):
            found.append(f"bounded: {name}")
        if sum(map(bool, mine.values())) <= 1 and not torch.equal(end[name], _after(x, everything)):
            found.append(f"alone: {name}")
        goes_up = torch.stack([one > 0 for one in everything]).all(0) if everything else low > x
        goes_down = torch.stack([one < 0 for one in everything]).all(0) if everything else low > x
        if bool(((end[name] == x) & (goes_up | goes_down)).any()):  # else updates may cancel each other
            found.append(f"last: {name}")
    return found


def _after(x: Tensor, updates: Sequence[Tensor]) -> Tensor:
    for one in updates:
        x = x + one
    return x
