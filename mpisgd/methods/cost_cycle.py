"""`found_cycle`: which steps stand for all, found in what a cost says of each of them."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpisgd.errors import InvalidArgument
from mpisgd.methods.cost_kit import Cycle, Op, Sizes, World
from mpisgd.methods.sizes import parameter, sizes_of

__all__ = ["found_cycle"]

# How often a method does something follows from its whole numbers; their product is a multiple of each.
PERIODS, FEWEST_STEPS, MOST_STEPS = 4, 64, 4096
SIZES = sizes_of([parameter(0, (4, 2), 4, 0), parameter(1, (4,), 4, 0)], 2**20)


def found_cycle(strategy: Any, steps: Callable[[Sizes, World, int], Iterator[Op]], world: World) -> Cycle:
    """Return the steps that stand for all.

    Args:
        strategy: whose whole numbers say how far to look.
        steps: its cost.
        world: the ranks.

    Raises:
        InvalidArgument: they do not repeat.
    """
    numbers = [value for value in vars(strategy).values() if type(value) is int and value > 0]
    count = min(max(FEWEST_STEPS, PERIODS * math.prod(numbers)), MOST_STEPS)
    told = [repr(list(steps(SIZES, world, step))) for step in range(1, count + 1)]
    for length in range(1, count // PERIODS + 1):
        first = _first_alike(told, length)
        if first <= count // 2:
            return Cycle(first, length)
    raise InvalidArgument(
        f"plan: what a step of {strategy} costs does not repeat within {count} steps; give it a method "
        "cycle(world) that returns a mpisgd.methods.cost_kit.Cycle"
    )


def _first_alike(told: Sequence[str], length: int) -> int:
    """Return after how many steps each is as the one `length` steps later."""
    first = len(told) - length
    while first and told[first - 1] == told[first - 1 + length]:
        first -= 1
    return first
