"""Items in a row, in parts of which the most costly costs as little as possible."""

from collections.abc import Sequence
from functools import cache

__all__ = ["balance"]


def balance(costs: Sequence[float], num_parts: int) -> list[int]:
    """Return how many items each part has: the largest sum of a part is the least that there can be.

    Args:
        costs: of items, whose order stays.
        num_parts: at most as many as items; each gets one at least.

    Cost: num_parts * n^2 / 2 comparisons of n items.
    """
    ends = [0.0]
    for cost in costs:
        ends.append(ends[-1] + cost)

    @cache
    def best(num_items: int, parts: int) -> tuple[float, int]:
        """Return the largest part of the first items, and where the last part begins."""
        if parts == 1:
            return ends[num_items], 0
        return min(
            (max(best(begin, parts - 1)[0], ends[num_items] - ends[begin]), begin)
            for begin in range(parts - 1, num_items)
        )

    sizes: list[int] = []
    end = len(costs)
    for parts in range(num_parts, 0, -1):
        begin = best(end, parts)[1]
        sizes.append(end - begin)
        end = begin
    return sizes[::-1]
