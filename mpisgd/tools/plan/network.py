"""What joins the hosts of a cluster: a switch, a fat tree, a torus; and which links a message crosses.

Switch        host - [ ] - host        each host has a link to it, which is all there is to share
FatTree       hosts - [leaf] = [core] = [leaf] - hosts
Torus         hosts in a grid, each with a link to the next one in each direction, closed at the ends
"""

import abc
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpisgd.arguments import check_positive, shown
from mpisgd.errors import InvalidArgument

__all__ = ["Carried", "Crossing", "FatTree", "Network", "Placement", "Switch", "Torus"]

Array = Any  # numpy's, of int64


@dataclass(frozen=True)
class Placement:
    """Where ranks are: rank r on host r // ranks_per_host.

    Attributes:
        hosts: how many.
        ranks_per_host: on each of them.
    """

    hosts: int
    ranks_per_host: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host


class Crossing(NamedTuple):
    """Links of one level that some messages cross.

    Attributes:
        level: what the links are called together.
        width: what each of them carries, as a multiple of a host's own link.
        messages: [m] places of the messages.
        links: [m] which link of the level each of them crosses.
    """

    level: str
    width: float
    messages: Array
    links: Array


class Carried(NamedTuple):
    """What the links of one level carry if each host sends one message to each of the others.

    Attributes:
        level: what the links are called together.
        width: what each of them carries, as a multiple of a host's own link.
        busiest: the messages on that of them which has most.
        total: the messages on all of them.
    """

    level: str
    width: float
    busiest: float
    total: float


@dataclass(frozen=True)
class Network(abc.ABC):
    """How hosts are joined. A subclass is a frozen dataclass."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """What it is called in texts, such as `one switch`."""

    @property
    def links_of_host(self) -> int:
        """Over how many links a host can send at the same time."""
        return 1

    @abc.abstractmethod
    def crossings(self, src: Array, dst: Array) -> Iterator[Crossing]:
        """Yield the links that messages from hosts `src` [m] to other hosts `dst` [m] cross."""

    @abc.abstractmethod
    def if_all_send(self, hosts: int) -> Iterator[Carried]:
        """Yield what the levels carry if each of the first `hosts` hosts sends to each of the others."""

    def busiest_if_all_send(self, hosts: int) -> float:
        """Return how many messages the busiest of all links carries then, in units of its width."""
        return max((each.busiest / each.width for each in self.if_all_send(hosts)), default=0.0)

    def busiest_by_hops(self, hosts: int) -> list[tuple[float, float]]:
        """Return the same of the messages alone that go so many hops or more, by this number of hops."""
        return [(1.0, self.busiest_if_all_send(hosts))]

    def hops(self, src: Array, dst: Array) -> Array:
        """Return [m] how many times a message takes the latency of a link."""
        return np.ones(len(src))

    def check(self, hosts: int) -> None:  # noqa: B027  # most networks have room for any number
        """Raise InvalidArgument where there is no such network of so many hosts."""


@dataclass(frozen=True)
class Switch(Network):
    """One switch that carries whatever its hosts send: a host's own link is the only limit."""

    @property
    def description(self) -> str:
        """See `Network`."""
        return "one switch"

    def crossings(self, src: Array, dst: Array) -> Iterator[Crossing]:
        """See `Network`."""
        every = np.arange(len(src))
        yield Crossing("host out", 1.0, every, src)
        yield Crossing("host in", 1.0, every, dst)

    def if_all_send(self, hosts: int) -> Iterator[Carried]:
        """See `Network`."""
        for level in ("host out", "host in"):
            yield Carried(level, 1.0, hosts - 1.0, hosts * (hosts - 1.0))


@dataclass(frozen=True)
class FatTree(Switch):
    """Leaf switches of some hosts each, joined by a core that carries `1 / oversubscription` of all of them.

    Attributes:
        hosts_per_switch: of each leaf.
        oversubscription: what the hosts of a leaf can send, for what the leaf can pass on; 1: non-blocking.

    Source: Leiserson 1985, "Fat-Trees"; Al-Fares and others 2008.
    """

    hosts_per_switch: int
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        check_positive("FatTree", "hosts_per_switch", self.hosts_per_switch, whole=True)
        check_positive("FatTree", "oversubscription", self.oversubscription)

    @property
    def description(self) -> str:
        """See `Network`."""
        return (
            f"fat tree, {self.hosts_per_switch} hosts per switch, oversubscription {self.oversubscription:g}"
        )

    @property
    def uplink(self) -> float:
        """What a leaf can pass on to the core, as a multiple of a host's link."""
        return self.hosts_per_switch / self.oversubscription

    def crossings(self, src: Array, dst: Array) -> Iterator[Crossing]:
        """See `Network`."""
        yield from super().crossings(src, dst)
        leaves = src // self.hosts_per_switch, dst // self.hosts_per_switch
        far = np.flatnonzero(leaves[0] != leaves[1])
        yield Crossing("leaf up", self.uplink, far, leaves[0][far])
        yield Crossing("leaf down", self.uplink, far, leaves[1][far])

    def if_all_send(self, hosts: int) -> Iterator[Carried]:
        """See `Network`."""
        yield from super().if_all_send(hosts)
        full, rest = divmod(hosts, self.hosts_per_switch)
        leaves = [self.hosts_per_switch] * full + [rest] * (rest > 0)
        passed_on = [float(here * (hosts - here)) for here in leaves]
        for level in ("leaf up", "leaf down"):
            yield Carried(level, self.uplink, max(passed_on), sum(passed_on))


@dataclass(frozen=True)
class Torus(Network):
    """A grid of hosts, closed in every dimension; messages go the shorter way, one dimension after the other.

    Attributes:
        shape: hosts along each dimension; host 0 and host 1 are neighbours in the last one.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = tuple(self.shape) if isinstance(self.shape, Iterable) else ()
        if not shape or not all(type(n) is int and n > 0 for n in shape):
            raise InvalidArgument(f"Torus: shape={shown(self.shape)}; expected numbers such as (8, 8)")
        object.__setattr__(self, "shape", shape)

    @property
    def description(self) -> str:
        """See `Network`."""
        return f"torus of {' x '.join(map(str, self.shape))}"

    @property
    def links_of_host(self) -> int:
        """See `Network`."""
        return 2 * len(self.shape)

    def check(self, hosts: int) -> None:
        """See `Network`."""
        if hosts > math.prod(self.shape):
            raise InvalidArgument(f"{self}: {hosts} hosts; it has room for {math.prod(self.shape)}")

    def crossings(self, src: Array, dst: Array) -> Iterator[Crossing]:
        """See `Network`: the links of each dimension, forwards and backwards."""
        hosts, steps = src.copy(), self._steps(src, dst)
        for dim, length in enumerate(self.shape):
            stride = math.prod(self.shape[dim + 1 :])
            for way in (1, -1):
                left = np.maximum(0, way * steps[dim])
                moving = np.flatnonzero(left)
                while len(moving):
                    here = hosts[moving]
                    yield Crossing(f"dimension {dim} {'+' if way > 0 else '-'}", 1.0, moving, here)
                    at = here // stride % length
                    hosts[moving] = here + ((at + way) % length - at) * stride
                    left[moving] -= 1
                    moving = moving[left[moving] > 0]

    def _coordinates(self, hosts: Array) -> list[Array]:
        return list(np.unravel_index(hosts, self.shape))

    def _steps(self, src: Array, dst: Array) -> list[Array]:
        """Return how far to go in each dimension, backwards where that is shorter."""
        both = zip(self._coordinates(src), self._coordinates(dst), self.shape, strict=True)
        forwards = [((there - here) % length, length) for here, there, length in both]
        return [np.where(2 * ahead > length, ahead - length, ahead) for ahead, length in forwards]

    def hops(self, src: Array, dst: Array) -> Array:
        """See `Network`."""
        return sum(np.abs(step) for step in self._steps(src, dst)).astype(float)

    def busiest_by_hops(self, hosts: int) -> list[tuple[float, float]]:
        """See `Network`: the busiest link has as much of each as all links have together."""
        far = self._pairs_by_hops(hosts) * np.arange(sum(self.shape) + 1)
        share = np.cumsum(far[::-1])[::-1] / max(1, far.sum())
        busiest = self.busiest_if_all_send(hosts)
        return [(float(hops), busiest * share[hops]) for hops in np.flatnonzero(far)] or [(1.0, busiest)]

    def _pairs_by_hops(self, hosts: int) -> Array:
        """Return [hops] how many pairs of hosts are so far from each other, as if their slices were full."""
        pairs, within = np.ones(1), math.prod(self.shape)
        for length in self.shape:
            within //= length
            used = min(length, -(-hosts // within))
            hosts = within if used > 1 else hosts
            src, dst = np.divmod(np.arange(used * used), used)
            ahead = (dst - src) % length
            pairs = np.convolve(pairs, np.bincount(np.minimum(ahead, length - ahead)))
        return np.pad(pairs, (0, sum(self.shape) + 1 - len(pairs)))

    def if_all_send(self, hosts: int) -> Iterator[Carried]:
        """See `Network`."""
        yield from _carried_on_torus(self.shape, hosts)


@lru_cache(maxsize=64)
def _carried_on_torus(shape: tuple[int, ...], hosts: int) -> list[Carried]:
    """Return the load on each level of a torus where each of the first hosts sends to each of the others.

    A message goes along a dimension with the earlier coordinates of its destination and the later ones of its
    source. So what a line of links carries depends on how many hosts have each coordinate along it: among
    those with its earlier coordinates, and among those with its later ones.
    """
    found, used = [], np.arange(hosts)
    for dim, length in enumerate(shape):
        along = length * math.prod(shape[dim + 1 :])
        within = along // length
        later = np.zeros((within, length), dtype=np.int64)
        np.add.at(later, (used % within, used // within % length), 1)
        earlier = np.zeros((-(-hosts // along), length), dtype=np.int64)
        np.add.at(earlier, (used // along, used // within % length), 1)
        for way in (1, -1):
            lines = [
                (many * times, _on_a_ring(sources, destinations, way))
                for sources, many in _distinct(later)
                for destinations, times in _distinct(earlier)
            ]
            busiest = float(max(carried.max() for _, carried in lines))
            total = float(sum(times * carried.sum() for times, carried in lines))
            found.append(Carried(f"dimension {dim} {'+' if way > 0 else '-'}", 1.0, busiest, total))
    return found


def _distinct(rows: Array) -> list[tuple[Array, int]]:
    """Return the different rows, and how many there are of each."""
    found, counts = np.unique(rows, axis=0, return_counts=True)
    return list(zip(found, counts.tolist(), strict=True))


def _on_a_ring(sources: Array, destinations: Array, way: int) -> Array:
    """Return [n] the messages on each link of a ring, in one direction.

    Args:
        sources: [n] how many hosts send from each place.
        destinations: [n] to how many hosts at each place each of them sends.
        way: 1 forwards, with the messages that go half of the ring; -1 backwards.
    """
    length = len(sources)
    places, carried = np.arange(length), np.zeros(length, dtype=np.int64)
    for steps in range(1, (length if way > 0 else length - 1) // 2 + 1):
        sent = sources * np.roll(destinations, -way * steps)
        sums = np.concatenate([[0], np.cumsum(np.concatenate([sent, sent]))])
        # A link carries what was sent at its own place and at the `steps` - 1 places before it.
        first = places + (length - steps + 1 if way > 0 else 0)
        carried += sums[first + steps] - sums[first]
    return carried
