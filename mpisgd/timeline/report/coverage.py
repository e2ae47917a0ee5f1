"""`Coverage`: how much of any stretch of time some intervals cover, each moment counted once."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["Coverage", "Floats"]

Floats = npt.NDArray[np.float64]


class Coverage:
    """The union of intervals.

    Args:
        intervals: (begin, end), in any order; they may overlap.
    """

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        merged: list[list[float]] = []
        for begin, end in sorted(intervals):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        self._edges = np.array(merged or [[0.0, 0.0]]).reshape(-1)
        lengths = np.diff(self._edges)
        lengths[1::2] = 0.0  # between two intervals
        self._covered = np.concatenate([[0.0], np.cumsum(lengths)])

    def within(self, begins: Floats, ends: Floats) -> Floats:
        """Return how much of each stretch [begin, end] is covered."""
        return self._until(ends) - self._until(begins)

    def _until(self, times: Floats) -> Floats:
        """Return how much was covered up to each of some moments: linear between two edges."""
        found: Floats = np.interp(times, self._edges, self._covered)
        return found
