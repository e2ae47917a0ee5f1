"""Which links the messages of a round cross, and how many of them each link carries: loads added per link.

Rates count nothing here, so what was found serves for any of them. Of latencies only those of a network count
beside each other: which message comes to a link later than another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.network import Network, Placement
from mpisgd.tools.plan.simulation.messages import Round

__all__ = ["Load", "Roads", "Way", "roads_of", "sum_of", "way_of"]

Array = Any  # numpy's


class Load(NamedTuple):
    """Messages at links of one kind.

    Attributes:
        level: of the links.
        width: what each of them carries, as a multiple of a host's link, or of what joins its ranks.
        messages: [m] places of the messages in their round.
        links: [m] which link each of them crosses.
    """

    level: str
    width: float
    messages: Array
    links: Array


@dataclass(frozen=True)
class Roads:
    """Where messages go, whatever the rates are.

    Attributes:
        network: of the hosts.
        place: of the ranks.
        within_is_shared: as of `Cluster`.
        between: what a hop and a message of its sender take, in units of the larger one.
        within: the same on a host.
    """

    network: Network
    place: Placement
    within_is_shared: bool
    between: tuple[float, float] = (1.0, 0.0)
    within: tuple[float, float] = (1.0, 0.0)

    def hosts_of(self, each: Round) -> tuple[Array, Array]:
        """Return [m] the hosts that send, and those that receive."""
        return each.src // self.place.ranks_per_host, each.dst // self.place.ranks_per_host

    def on_a_host(self, src: Array, dst: Array) -> Iterator[Load]:
        """Yield what messages cross from ranks `src` [m] to others of the same host."""
        every = np.arange(len(src))
        if self.within_is_shared:
            yield Load("memory", 1.0, every, src // self.place.ranks_per_host)
        else:
            yield Load("rank out", 1.0, every, src)
            yield Load("rank in", 1.0, every, dst)


def roads_of(cluster: Cluster) -> Roads:
    """Return where messages go on a cluster."""
    units = (_unit_of(link) for link in (cluster.between, cluster.within))
    return Roads(cluster.network, cluster.placement, cluster.within_is_shared, *units)


def _unit_of(link: Link) -> tuple[float, float]:
    larger = max(link.latency_s, link.message_s) or 1.0
    return link.latency_s / larger, link.message_s / larger


def sum_of(one: Array, other: Array) -> Array:
    """Return the sum of two arrays, of which the shorter one goes on with zeros."""
    if len(one) < len(other):
        one, other = other, one
    found = one.astype(float)
    found[: len(other)] += other
    return found


class Way(NamedTuple):
    """What the messages of a round meet, whatever the rates are.

    Attributes:
        is_far: [m] whether a message leaves its host.
        hops: [m] links' latencies on its way.
        place: [m] which one of its sender's messages it is; the first is 1.
        busy: [m] the messages on the most loaded link of its way, over the width of that.
        sent: [ranks] messages of each rank.
        received: [ranks] that it gets.
        on_links: by level, [links] how many messages cross each link of it.
    """

    is_far: Array
    hops: Array
    place: Array
    busy: Array
    sent: Array
    received: Array
    on_links: dict[str, Array]


def way_of(roads: Roads, each: Round) -> Way:
    """Return the load that the messages of a round meet, of a round that lists all of them."""
    (src, dst), size = roads.hosts_of(each), roads.place.size
    sent, received = (np.bincount(ranks, minlength=size) for ranks in (each.src, each.dst))
    place = _place_of(each.src) if len(sent) and sent.max() > 1 else np.ones(len(src))
    is_far, hops, busy = src != dst, np.ones(len(src)), np.zeros(len(src))
    on_links: dict[str, Array] = {}
    here, far = np.flatnonzero(~is_far), np.flatnonzero(is_far)
    if len(here):
        hop, message = roads.within
        near = _Met(list(roads.on_a_host(each.src[here], each.dst[here])), hop + message * place[here])
        busy[here] = near.busy()
        on_links |= near.on_links()
    if len(far):
        hop, message = roads.between
        # Ranks of a host that send to the same other host meet the same: they are walked once.
        alike = (src[far] * roads.place.hosts + dst[far]) * size + place[far].astype(np.int64)
        _, first, inverse, counts = np.unique(
            alike, return_index=True, return_inverse=True, return_counts=True
        )
        ends = src[far[first]], dst[far[first]]
        lengths = roads.network.hops(*ends)
        loads = [Load(*crossing) for crossing in roads.network.crossings(*ends)]
        apart = _Met(loads, hop * lengths + message * place[far[first]], counts)
        hops[far], busy[far] = lengths[inverse], apart.busy()[inverse]
        on_links |= apart.on_links()
    return Way(is_far, hops, place, busy, sent, received, on_links)


@dataclass(frozen=True)
class _Met:
    """Messages at links.

    Attributes:
        loads: which links they cross.
        times: [m] when they come there, as far as that tells which one is later.
        counts: [m] how many each of them stands for; None: one.
    """

    loads: Sequence[Load]
    times: Array
    counts: Array | None = None

    def on_links(self) -> dict[str, Array]:
        """Return by level [links] how many messages cross each of its links.

        Messages of several hops cross links of the same level after one another: these add up.
        """
        found: dict[str, Array] = {}
        for load in self.loads:
            if len(load.links):
                weights = None if self.counts is None else self.counts[load.messages]
                carried = np.bincount(load.links, weights)
                found[load.level] = sum_of(found[load.level], carried) if load.level in found else carried
        return found

    def busy(self) -> Array:
        """Return [m] what the most loaded link on the way of each message has to carry from then on.

        The last message of a link ends when all is carried that came with or after some message which found
        the link idle. So each is given what came with it or later, and the longest of these is the link's.
        """
        found = np.zeros(len(self.times))
        for level in {load.level for load in self.loads}:
            here = [load for load in self.loads if load.level == level]
            messages = np.concatenate([load.messages for load in here])
            if len(messages):
                links = np.concatenate([load.links for load in here])
                counts = np.ones(len(messages)) if self.counts is None else self.counts[messages]
                carried = _as_late(links, self.times[messages], counts)
                np.maximum.at(found, messages, carried / here[0].width)
        return found


def _place_of(src: Array) -> Array:
    """Return [m] which one of its sender's messages each is, from 1 on."""
    order = np.argsort(src, kind="stable")
    begins = np.flatnonzero(np.diff(src[order], prepend=-1))
    found = np.empty(len(src))
    found[order] = np.arange(1, len(src) + 1) - np.repeat(begins, np.diff(np.append(begins, len(src))))
    return found


def _as_late(links: Array, times: Array, counts: Array) -> Array:
    """Return [m] how many messages come to the link of a message when it does, or later."""
    if times.min() == times.max():
        return np.bincount(links, counts)[links]
    order = np.lexsort((-times, links))
    links, times = links[order], times[order]
    is_first = np.diff(links, prepend=-1) != 0
    is_last = np.append((np.diff(links) != 0) | (np.diff(times) != 0), True)  # of those of the same time
    sums = np.concatenate([[0.0], np.cumsum(counts[order])])
    begins, ends = np.flatnonzero(is_first), np.flatnonzero(is_last) + 1
    begin = begins[np.cumsum(is_first) - 1]
    end = ends[np.cumsum(np.append(True, is_last[:-1])) - 1]
    found = np.empty(len(links))
    found[order] = sums[end] - sums[begin]
    return found
