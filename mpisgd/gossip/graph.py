"""`Graph`: which ranks exchange with which, and with what weights. Plain data; nothing is sent here."""

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.errors import InvalidArgument
from mpisgd.gossip.mixing import (
    Rows,
    dense_of,
    is_column_stochastic,
    is_row_stochastic,
    is_strongly_connected,
    metropolis_hastings,
    second_eigenvalue,
)

__all__ = ["Exchange", "Graph"]


class Exchange(NamedTuple):
    """What one rank does in one step: x <- sum of weight * x_rank over the pairs (rank, weight) of `terms`.

    Attributes:
        destinations: the ranks that it sends to, ascending.
        terms: (rank, weight) pairs, ascending; this rank is one of them unless its weight is 0.
    """

    destinations: tuple[int, ...]
    terms: tuple[tuple[int, float], ...]

    def sources(self, rank: int) -> list[int]:
        """Return the ranks that `rank`, whose exchange this is, receives from."""
        return [src for src, _ in self.terms if src != rank]


@dataclass(frozen=True)
class Graph(abc.ABC):
    """Which ranks exchange with which. A subclass is a frozen dataclass with the same fields on all ranks.

    Weights are Metropolis-Hastings weights. They make the mixing matrix doubly stochastic if the graph is
    undirected, or if all ranks have the same number of neighbours.
    """

    @abc.abstractmethod
    def destinations(self, size: int, step: int) -> Sequence[Iterable[int]]:
        """Return, for each of `size` ranks, the other ranks that it sends to in this step."""

    def distances(self, size: int, step: int) -> Sequence[int] | None:
        """Return the distances to the ranks that a rank sends to, if they are the same for all ranks; else
        None.
        """
        return None

    def degrees(self, size: int, step: int) -> tuple[float, int]:
        """Return the number of ranks that a rank sends to in this step: the mean and the maximum."""
        distances = self.distances(size, step)
        if distances is not None:
            return len(distances), len(distances)
        degrees = [len(list(to)) for to in self.destinations(size, step)]
        return sum(degrees) / size, max(degrees)

    def check(self, size: int) -> None:  # noqa: B027  # most graphs have any number
        """Raise if there is no such graph of this many ranks.

        Raises:
            InvalidArgument: says why.
        """

    def num_phases(self, size: int) -> int | None:
        """Return the number of steps after which the exchanges repeat; None: never."""
        return 1

    def rows(self, size: int, step: int = 0) -> Rows:
        """Return the rows of the mixing matrix of a step; see `mpisgd.gossip.mixing`."""
        return metropolis_hastings(self.destinations(size, step))

    def matrix(self, size: int, step: int = 0) -> Tensor:
        """Return the mixing matrix of a step, [size, size] of float64."""
        return dense_of(self.rows(size, step))

    def exchange(self, rank: int, size: int, step: int = 0) -> Exchange:
        """Return the ranks that a rank sends to and receives from in a step."""
        phases = self.num_phases(size)
        return _exchange(self, rank, size, step if phases is None else step % phases)

    def spectral_gap(self, size: int) -> float:
        """Return 1 - |second largest eigenvalue|: in each step the ranks' differences shrink by that share.

        If steps differ, it is that of the product of all phases, per step. 1: all ranks have the mean after
        one period.
        """
        phases = self.num_phases(size) or 1
        product = torch.eye(size, dtype=torch.float64)
        for step in range(phases):
            product = self.matrix(size, step) @ product
        return float(1.0 - second_eigenvalue(product) ** (1.0 / phases))

    def check_mixing(self, name: str, size: int, *, doubly: bool) -> None:
        """Raise if the ranks would not converge to their mean; checks every phase.

        Args:
            name: name of the caller, for messages.
            size: number of ranks.
            doubly: whether rows must sum to 1, too.

        Raises:
            InvalidArgument: a matrix does not keep the sum over the ranks, or information does not spread
                from every rank to every other.
        """
        self.check(size)
        phases = self.num_phases(size)
        reached: list[dict[int, float]] = [{} for _ in range(size)]
        for step in range(phases or 1):
            rows = self.rows(size, step)
            if not is_column_stochastic(rows):
                raise InvalidArgument(
                    f"{name}: topology={self!r}: a column of the mixing matrix does not sum to 1, so "
                    "the mean over the ranks would change"
                )
            if doubly and not is_row_stochastic(rows):
                raise InvalidArgument(
                    f"{name}: topology={self!r}: a row of the mixing matrix does not sum to 1; "
                    'style="push_sum" is for matrices of which only the columns do'
                )
            for everything, row in zip(reached, rows, strict=True):
                everything.update(row)
        if phases is not None and not is_strongly_connected(reached):
            raise InvalidArgument(
                f"{name}: topology={self!r} is not connected: what some ranks have never comes to some others"
            )


@lru_cache(maxsize=256)
def _exchange(graph: Graph, rank: int, size: int, step: int) -> Exchange:
    rows = graph.rows(size, step)
    destinations = tuple(i for i, row in enumerate(rows) if rank in row and i != rank)
    return Exchange(destinations, tuple(sorted(rows[rank].items())))
