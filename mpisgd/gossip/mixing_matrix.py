"""`MixingMatrix`: weights that the user gives."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from mpisgd.arguments import shown
from mpisgd.errors import InvalidArgument
from mpisgd.gossip.graph import Graph
from mpisgd.gossip.mixing import Rows, is_column_stochastic, is_row_stochastic

__all__ = ["MixingMatrix"]

MAX_SHOWN = 4  # ranks of which a message shows all weights


@dataclass(frozen=True, repr=False)
class MixingMatrix(Graph):
    """A mixing matrix given by the user, for as many ranks as it has rows.

    Attributes:
        weights: [size][size]; `weights[i][j]` is the weight of rank j's tensor in the sum of rank i; if it is
            not 0, j sends to i. A tensor, an array or nested lists; kept as nested tuples. If columns sum to
            1, the sum over the ranks is kept; if rows sum to 1, values that are equal on all ranks stay as
            they are.

    Raises:
        InvalidArgument: the matrix is not square, has a negative or non-finite weight, or neither its columns
            nor its rows sum to 1.
    """

    weights: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        weights = _as_tuples(self.weights)
        object.__setattr__(self, "weights", weights)
        rows = _rows(weights)
        if not (is_column_stochastic(rows) or is_row_stochastic(rows)):
            sums = [math.fsum(column) for column in zip(*weights, strict=True)]
            raise InvalidArgument(
                f"topology={self!r}: neither the columns of the matrix sum to 1 nor its rows; columns sum to "
                f"{shown(sums)}. Give weights in float64"
            )

    def __repr__(self) -> str:
        return _text(self.weights)

    def check(self, size: int) -> None:
        """Raise if the number of ranks is not that of the rows."""
        if size != len(self.weights):
            raise InvalidArgument(f"topology={self!r} is for {len(self.weights)} ranks; there are {size}")

    def destinations(self, size: int, step: int) -> Sequence[Iterable[int]]:
        """See `Graph`."""
        rows = self.rows(size, step)
        return [[i for i in range(size) if j in rows[i] and i != j] for j in range(size)]

    def rows(self, size: int, step: int = 0) -> Rows:
        """Return the rows, without zeros."""
        self.check(size)
        return _rows(self.weights)


@lru_cache(maxsize=16)
def _rows(weights: Sequence[Sequence[float]]) -> Rows:
    return tuple({j: weight for j, weight in enumerate(row) if weight} for row in weights)


@lru_cache(maxsize=16)
def _text(weights: Sequence[Sequence[float]]) -> str:
    """Return a matrix as text, for comparisons."""
    if len(weights) <= MAX_SHOWN:
        return f"MixingMatrix({weights!r})"
    digest = hashlib.blake2b(repr(weights).encode(), digest_size=8).hexdigest()
    return f"MixingMatrix({len(weights)} ranks, hash {digest})"


def _as_tuples(weights: Any) -> tuple[tuple[float, ...], ...]:
    """Return a square matrix of weights as nested tuples of floats."""
    try:
        listed = weights.tolist() if isinstance(weights, Tensor) else weights
        rows = tuple(tuple(float(weight) for weight in row) for row in listed)
    except (TypeError, ValueError, RuntimeError):
        rows = ()
    if not rows or any(len(row) != len(rows) for row in rows):
        raise InvalidArgument(f"topology={shown(weights)}; expected a square matrix of weights")
    wrong = [weight for row in rows for weight in row if not 0 <= weight <= 1 + 1e-9]
    if wrong:
        raise InvalidArgument(f"topology: a weight of the mixing matrix is {wrong[0]}; expected 0 to 1")
    return rows
