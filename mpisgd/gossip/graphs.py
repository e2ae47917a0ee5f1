r"""The graphs that have names: ring, torus, hypercube, exponential, star, complete, random pairs.

ring     0 - 1 - 2 - 3 - 0        torus    0 - 1 - 2 - 0      star    1   2
                                           |   |   |                   \\ /
                                           3 - 4 - 5 - 3                0 - 3

exponential   rank r sends to r + 1, r + 2, r + 4, ..., in one step (one-peer: to one of them per step)
"""

import abc
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mpisgd.arguments import check_seed, shown
from mpisgd.errors import InvalidArgument
from mpisgd.gossip.graph import Graph
from mpisgd.gossip.mixing_matrix import MixingMatrix

__all__ = [
    "NAMED_GRAPHS",
    "Complete",
    "Exponential",
    "GraphLike",
    "Hypercube",
    "OnePeerExponential",
    "RandomPairs",
    "Ring",
    "Star",
    "Torus",
    "as_graph",
]


def _others(size: int, of: Callable[[int], Iterable[int]]) -> list[list[int]]:
    """Return the neighbours of each rank, each once and without itself: in small graphs some coincide."""
    return [sorted(set(of(rank)) - {rank}) for rank in range(size)]


class _Circulant(Graph):
    """Every rank sends to those at the same distances."""

    @abc.abstractmethod
    def distances(self, size: int, step: int) -> Sequence[int]:
        """See `Graph`."""

    def destinations(self, size: int, step: int) -> Sequence[Iterable[int]]:
        """See `Graph`."""
        distances = self.distances(size, step)
        return _others(size, lambda rank: ((rank + each) % size for each in distances))


@dataclass(frozen=True)
class Ring(_Circulant):
    """Every rank exchanges with the ones before and after it. Spectral gap (2 - 2 cos(2 pi / size)) / 3."""

    def distances(self, size: int, step: int) -> Sequence[int]:
        """See `Graph`."""
        return sorted({1, size - 1}) if size > 1 else []


@dataclass(frozen=True)
class Torus(Graph):
    """A grid, as square as the number of ranks allows, closed in both directions; a ring if it is prime."""

    def destinations(self, size: int, step: int) -> Sequence[Iterable[int]]:
        """See `Graph`."""
        columns = size // _largest_divisor(size, math.isqrt(size))

        def neighbours(rank: int) -> Iterable[int]:
            first = rank - rank % columns
            yield first + (rank - 1) % columns
            yield first + (rank + 1) % columns
            yield (rank - columns) % size
            yield (rank + columns) % size

        return _others(size, neighbours)


def _largest_divisor(number: int, limit: int) -> int:
    return next(d for d in range(limit, 0, -1) if number % d == 0)


@dataclass(frozen=True)
class Hypercube(Graph):
    """Ranks whose numbers differ in one bit exchange; a power of two of them. Gap 2 / (1 + log2(size))."""

    def check(self, size: int) -> None:
        """Raise if the number of ranks is not a power of two."""
        if size & (size - 1):
            raise InvalidArgument(
                f"topology={self!r}: there are {size} ranks; a hypercube has a power of two of them. "
                "Exponential() is for any number"
            )

    def destinations(self, size: int, step: int) -> Sequence[Iterable[int]]:
        """See `Graph`."""
        self.check(size)
        return _others(size, lambda rank: (rank ^ 1 << k for k in range(_num_bits(size))))


@dataclass(frozen=True)
class Exponential(_Circulant):
    """Rank r sends to r + 1, r + 2, r + 4, ...: log2(size) messages, and a large spectral gap.

    Source: Ying and others 2021, "Exponential graph is provably efficient for decentralized deep training".
    """

    def distances(self, size: int, step: int) -> Sequence[int]:
        """See `Graph`."""
        return [1 << k for k in range(_num_bits(size))]


@dataclass(frozen=True)
class OnePeerExponential(_Circulant):
    """In step t rank r sends to r + 2**(t mod log2(size)) only: one message, and a new partner every step.

    If the number of ranks is a power of two, all have the exact mean after log2(size) steps.

    Source: Assran and others 2019, "Stochastic gradient push"; Ying and others 2021, as `Exponential`.
    """

    def num_phases(self, size: int) -> int:
        """Return log2(size), rounded up."""
        return max(1, _num_bits(size))

    def distances(self, size: int, step: int) -> Sequence[int]:
        """See `Graph`."""
        return [1 << step % self.num_phases(size)] if size > 1 else []


def _num_bits(size: int) -> int:
    return (size - 1).bit_length()


@dataclass(frozen=True)
class Star(Graph):
    """Each rank exchanges with rank 0 alone. Spectral gap 1 / size."""

    def destinations(self, size: int, step: int) -> Sequence[Iterable[int]]:
        """See `Graph`."""
        return _others(size, lambda rank: (0,) if rank else range(size))


@dataclass(frozen=True)
class Complete(Graph):
    """Each rank exchanges with all others: the mean in one step, and size - 1 messages per rank."""

    def destinations(self, size: int, step: int) -> Sequence[Iterable[int]]:
        """See `Graph`."""
        return _others(size, lambda rank: range(size))


@dataclass(frozen=True)
class RandomPairs(Graph):
    """In every step the ranks form random pairs, which average; with an odd number one rank is left out.

    Attributes:
        seed: seed of the pairs, the same on all ranks.

    Source: Boyd and others 2006, "Randomized gossip algorithms".
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_seed("RandomPairs", self.seed)

    def num_phases(self, size: int) -> None:
        """Return None: the pairs never repeat."""

    def destinations(self, size: int, step: int) -> Sequence[Iterable[int]]:
        """See `Graph`."""
        ranks = list(range(size))
        random.Random(f"{self.seed}, {step}").shuffle(ranks)
        partner = dict(zip(ranks[::2], ranks[1::2], strict=False))
        partner.update({b: a for a, b in partner.items()})
        return [[partner[rank]] if rank in partner else [] for rank in range(size)]

    def spectral_gap(self, size: int) -> float:
        """Return the spectral gap of E[W], the mean of the matrices W of all pairings.

        It is the expected decrease in a step, E |W x|**2 = x' E[W] x, since each W is a projection.
        """
        if size <= 2:
            return 1.0
        return 1.0 - (size - 2) / (2 * (size - 1)) if size % 2 == 0 else 0.5


NAMED_GRAPHS: dict[str, Graph] = {
    "ring": Ring(),
    "torus": Torus(),
    "hypercube": Hypercube(),
    "exponential": Exponential(),
    "one_peer_exponential": OnePeerExponential(),
    "star": Star(),
    "complete": Complete(),
    "random_pairs": RandomPairs(),
}


GraphLike = Graph | str | Sequence[Sequence[float]] | Tensor  # a name, or a matrix


def as_graph(name: str, topology: object) -> Graph:
    """Return the graph that a user has given by its name, as a `Graph`, or as a matrix.

    Args:
        name: of the function it was given to, for messages.
        topology: see above.

    Raises:
        InvalidArgument: it is none, or a matrix that is not stochastic.
    """
    if isinstance(topology, Graph):
        return topology
    if isinstance(topology, str) and topology in NAMED_GRAPHS:
        return NAMED_GRAPHS[topology]
    if isinstance(topology, str) or not isinstance(topology, Iterable):
        raise InvalidArgument(
            f"{name}: topology={shown(topology)}; expected one of {', '.join(NAMED_GRAPHS)}, a graph of "
            "mpisgd.gossip, or a mixing matrix"
        )
    return MixingMatrix(topology)  # type: ignore[arg-type]  # it is looked at there
