"""Collectives as the messages they consist of: the algorithms of `mpisgd.collectives`, as data.

An algorithm is a list of rounds. In a round every rank sends what it has to, and a rank's messages of a round
wait for what it received in the rounds before. So a round is three arrays, and 100,000 ranks are no more code
than three. The numbers of bytes are means: that n / p is no whole number makes a difference of an element.

    ring, p = 4      round 1 .. 6   0>1  1>2  2>3  3>0               n / 4 each
    doubling, p = 4  round 1        0<>1  2<>3    n / 2      round 2    0<>2  1<>3    n / 4   ... and back

Sources: as of the functions in `mpisgd.collectives.algorithms`; the hierarchical one as in
`mpisgd.transport.internode`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpisgd.errors import InvalidArgument
from mpisgd.tools.plan.network import Placement
from mpisgd.transport.internode.schedule import halves

__all__ = ["ALL_REDUCE", "Round", "collective_rounds", "neighbours", "shift"]

Array = Any  # numpy's, of int64


@dataclass(frozen=True)
class Round:
    """Messages that are sent at the same time.

    Attributes:
        src: [m] ranks that send.
        dst: [m] ranks that receive.
        nbytes: of each message.
        repeats: how often the round comes, each one after the other.
        combines: whether what arrives is added to what is there.
        everyone: instead of `src` and `dst`, each rank sends to the ranks of the same place on all other
            hosts; where hosts are many, pairs are too many to list.
        on_each_host: `src` and `dst` are of the first host, and the ranks of all others do the same.
        in_frames: whether messages travel as small ones, which cross each other without taking turns, or are
            read from shared memory.
    """

    src: Array
    dst: Array
    nbytes: float
    repeats: int = 1
    combines: bool = False
    everyone: bool = False
    on_each_host: bool = False
    in_frames: bool = False

    def listed(self, place: Placement) -> "Round":
        """Return the round with all its messages in `src` and `dst`, in the order in which ranks send."""
        if self.everyone:
            ranks = np.arange(place.size)[:, None]
            # Each begins with the next one, so that not all send to the same first.
            dst = (ranks + place.ranks_per_host * np.arange(1, place.hosts)) % place.size
            src = np.broadcast_to(ranks, dst.shape)
        elif self.on_each_host:
            first = np.arange(place.hosts)[:, None] * place.ranks_per_host
            src, dst = first + self.src, first + self.dst
        else:
            return self
        return replace(self, src=src.ravel(), dst=dst.ravel(), everyone=False, on_each_host=False)


NOBODY = np.empty(0, np.int64)


def ring(place: Placement, nbytes: float) -> list[Round]:
    """Return 2 (p - 1) rounds in which each rank sends n / p to the next one."""
    after = shift(place.size, 1, nbytes / place.size)
    half = replace(after, repeats=place.size - 1)
    return [replace(half, combines=True), half]


def halving_doubling(place: Placement, nbytes: float) -> list[Round]:
    """Return log2(p) exchanges of halves, quarters, ..., and the same backwards.

    Ranks beyond a power of two hand all they have to a partner before, and get the result afterwards.
    """
    power = 1 << (place.size.bit_length() - 1)
    extra, ranks = np.arange(power, place.size), np.arange(power)
    halving = [
        Round(ranks, ranks ^ distance, nbytes * distance / power, combines=True)
        for distance in (power >> bit for bit in range(1, power.bit_length()))
    ]
    doubling = [replace(each, combines=False) for each in reversed(halving)]
    into = [Round(extra, extra - power, nbytes, combines=True)] if len(extra) else []
    back = [Round(extra - power, extra, nbytes)] if len(extra) else []
    return [*into, *halving, *doubling, *back]


def tree(place: Placement, nbytes: float) -> list[Round]:
    """Return a reduction to rank 0 along a binomial tree, and a broadcast along the same."""
    up = []
    for bit in range((place.size - 1).bit_length()):
        children = np.arange(1 << bit, place.size, 2 << bit)
        up.append(Round(children, children - (1 << bit), nbytes, combines=True))
    return [*up, *(replace(each, src=each.dst, dst=each.src, combines=False) for each in reversed(up))]


def all_to_all(place: Placement, nbytes: float) -> list[Round]:
    """Return two rounds in which each rank sends n / p to every other one."""
    return _direct(_all_pairs(place.size), nbytes / place.size)


def hierarchical(place: Placement, nbytes: float) -> list[Round]:
    """Return a reduction on each host, an exchange between the hosts, and a copy on each host.

    Every host finishes 1 / h of the elements: it gets everyone's sums of it, and hands the result to all.
    Each of its ranks does so for the elements that it has added up; with one leader as many bytes pass. Many
    hosts exchange by halving and doubling, see `mpisgd.transport.internode.schedule`.
    """
    on_host = node(place, nbytes)
    if halves(place.hosts):
        between = _between_many(place, nbytes)
        on_host = [each.listed(place) for each in on_host]
        return [*on_host[:1], *between, *on_host[1:]]
    part = Round(NOBODY, NOBODY, nbytes / place.size, everyone=True, in_frames=True)
    between = [replace(part, combines=True), part] if place.hosts > 1 else []
    return [*on_host[:1], *between, *on_host[1:]] if place.ranks_per_host > 1 else between


def _between_many(place: Placement, nbytes: float) -> list[Round]:
    """Return the exchanges of halves between ranks of the same place on a power of two of hosts."""
    hosts, ranks = np.divmod(np.arange(place.size), place.ranks_per_host)
    halving = []
    for number in range(place.hosts.bit_length() - 1):
        partners = (hosts ^ (1 << number)) * place.ranks_per_host + ranks
        part = nbytes / place.ranks_per_host / (2 << number)
        halving.append(Round(np.arange(place.size), partners, part, combines=True, in_frames=True))
    return [*halving, *(replace(each, combines=False) for each in reversed(halving))]


def node(place: Placement, nbytes: float) -> list[Round]:
    """Return the copies of a host's ranks in shared memory: each reads its part of all, then the results."""
    k = place.ranks_per_host
    if k == 1:
        return []
    return [replace(each, on_each_host=True, in_frames=True) for each in _direct(_all_pairs(k), nbytes / k)]


def _direct(pairs: tuple[Array, Array], nbytes: float) -> list[Round]:
    back = Round(*pairs, nbytes)
    return [replace(back, combines=True), back]


def _all_pairs(size: int) -> tuple[Array, Array]:
    src, dst = (each.ravel() for each in np.divmod(np.arange(size * size), size))
    apart = src != dst
    return src[apart], dst[apart]


def shift(size: int, distance: int, nbytes: float) -> Round:
    """Return the round in which every rank sends to the one that comes `distance` after it."""
    ranks = np.arange(size)
    return Round(ranks, (ranks + distance) % size, nbytes)


ALL_REDUCE: dict[str, Callable[[Placement, float], list[Round]]] = {
    "hierarchical": hierarchical,
    "ring": ring,
    "halving_doubling": halving_doubling,
    "tree": tree,
    "all_to_all": all_to_all,
}


def collective_rounds(collective: str, algorithm: str, place: Placement, nbytes: float) -> list[Round]:
    """Return the rounds of an all-reduce of `nbytes`, or of a half of it; none on one rank.

    An all-reduce is a reduce-scatter, after which each rank has 1 / p of the sum, and an all-gather of these.

    Raises:
        InvalidArgument: there is no such algorithm.
    """
    if algorithm not in ALL_REDUCE:
        raise InvalidArgument(f"plan: algorithm={algorithm!r}; expected one of {', '.join(ALL_REDUCE)}")
    rounds = ALL_REDUCE[algorithm](place, nbytes) if place.size > 1 else []
    return [each for each in rounds if HALVES[collective] in (None, each.combines)]


# Whether the rounds of a collective add up what arrives; None: both kinds.
HALVES = {"all_reduce": None, "reduce_scatter": True, "all_gather": False}


def neighbours(destinations: Sequence[Sequence[int]], nbytes: float) -> list[Round]:
    """Return rounds in which every rank sends `nbytes` to each of its neighbours, one after the other.

    Args:
        destinations: of each rank.
        nbytes: of a message.
    """
    found = []
    for number in range(max(map(len, destinations), default=0)):
        pairs = [(src, to[number]) for src, to in enumerate(destinations) if number < len(to)]
        src, dst = np.array(pairs).T
        found.append(Round(src, dst, nbytes))
    return found
