"""What joins the hosts of a cluster: a switch, a fat tree, a torus; and which links a message crosses.

Switch        host - [ ] - host        each host has a link to it, which is all there is to share
FatTree       hosts - [leaf] = [core] = [leaf] - hosts
Torus         hosts in a grid, each with a link to the next one in each direction, closed at the ends
"""

import abc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpisgd.arguments import check_positive, shown
from mpisgd.errors import InvalidArgument

__all__ = ["Crossing", "FatTree", "Network", "Placement", "Switch", "Torus"]

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


@dataclass(frozen=True)
class Network(abc.ABC):
    """How hosts are joined. A subclass is a frozen dataclass."""

    @abc.abstractmethod
    def crossings(self, src: Array, dst: Array) -> Iterator[Crossing]:
        """Yield the links that messages from hosts `src` [m] to other hosts `dst` [m] cross."""

    @abc.abstractmethod
    def busiest_if_all_send(self, hosts: int) -> float:
        """Return how many messages cross the busiest link, in units of its width, if each host sends one to
        each of the others.
        """

    def hops(self, src: Array, dst: Array) -> Array:
        """Return [m] how many times a message takes the latency of a link."""
        return np.ones(len(src))

    def max_hops(self, hosts: int) -> float:
        """Return the largest of these."""
        return 1.0

    def check(self, hosts: int) -> None:  # noqa: B027  # most networks have room for any number
        """Raise InvalidArgument where there is no such network of so many hosts."""


@dataclass(frozen=True)
class Switch(Network):
    """One switch that carries whatever its hosts send: a host's own link is the only limit."""

    def crossings(self, src: Array, dst: Array) -> Iterator[Crossing]:
        """See `Network`."""
        every = np.arange(len(src))
        yield Crossing("host out", 1.0, every, src)
        yield Crossing("host in", 1.0, every, dst)

    def busiest_if_all_send(self, hosts: int) -> float:
        """See `Network`."""
        return hosts - 1.0


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

    def busiest_if_all_send(self, hosts: int) -> float:
        """See `Network`."""
        here = min(self.hosts_per_switch, hosts)
        return max(hosts - 1.0, here * (hosts - here) / self.uplink)


@dataclass(frozen=True)
class Torus(Network):
    """A grid of hosts, closed in every dimension; messages go the shorter way, one dimension after the other.

    Attributes:
        shape: hosts along each dimension; host 0 and host 1 are neighbours in the last one.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.shape or not all(isinstance(n, int) and n > 0 for n in self.shape):
            raise InvalidArgument(f"Torus: shape={shown(self.shape)}; expected numbers such as (8, 8)")

    def check(self, hosts: int) -> None:
        """See `Network`."""
        if hosts > math.prod(self.shape):
            raise InvalidArgument(f"{self}: {hosts} hosts; it has room for {math.prod(self.shape)}")

    def crossings(self, src: Array, dst: Array) -> Iterator[Crossing]:
        """See `Network`: the links of each dimension, forwards and backwards."""
        here, steps = self._coordinates(src), self._steps(src, dst)
        for dim, length in enumerate(self.shape):
            for way in (1, -1):
                left = np.maximum(0, way * steps[dim])
                while left.any():
                    moving = np.flatnonzero(left)
                    links = np.ravel_multi_index(tuple(axis[moving] for axis in here), self.shape)
                    yield Crossing(f"dimension {dim} {'+' if way > 0 else '-'}", 1.0, moving, links)
                    here[dim][moving] = (here[dim][moving] + way) % length
                    left[moving] -= 1

    def _coordinates(self, hosts: Array) -> list[Array]:
        return [axis.copy() for axis in np.unravel_index(hosts, self.shape)]

    def _steps(self, src: Array, dst: Array) -> list[Array]:
        """Return how far to go in each dimension, backwards where that is shorter."""
        both = zip(self._coordinates(src), self._coordinates(dst), self.shape, strict=True)
        forwards = [((there - here) % length, length) for here, there, length in both]
        return [np.where(2 * ahead > length, ahead - length, ahead) for ahead, length in forwards]

    def hops(self, src: Array, dst: Array) -> Array:
        """See `Network`."""
        return sum(np.abs(step) for step in self._steps(src, dst)).astype(float)

    def max_hops(self, hosts: int) -> float:
        """See `Network`."""
        return float(sum(length // 2 for length in self.shape))

    def busiest_if_all_send(self, hosts: int) -> float:
        """See `Network`: every host sends to one at each distance, of which half go forwards."""
        total = math.prod(self.shape)
        return max(sum(range(1, length // 2 + 1)) * total / length for length in self.shape)
