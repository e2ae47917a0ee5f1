"""What a collective takes on a cluster: round by round, or by its messages one by one.

Where all ranks do the same at the same time, a round is over when the busiest link has carried its messages:

    seconds(round) = latency + bytes on the busiest link / its rate + what adding up takes

So one number for each round is enough, at any number of ranks, and a collective of n bytes takes alpha + beta
n. `simulate_messages` is the same with every message as a task of the discrete-event simulation, where ranks
may run ahead of others; to see that both agree, and for a few hundred ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpisgd.errors import InvalidArgument
from mpisgd.plan.cluster import Cluster, Link
from mpisgd.plan.simulation.engine import Task, simulate
from mpisgd.plan.simulation.messages import ALL_REDUCE, Round, collective_rounds

__all__ = [
    "AUTO",
    "CANDIDATES",
    "Cost",
    "check_algorithm",
    "cost_of",
    "cost_of_rounds",
    "fastest",
    "link_bytes",
    "round_seconds",
    "rounds_of",
    "simulate_messages",
]

AUTO = "auto"
# What `auto` takes of, as mpisgd does between hosts. On one host all of them are memory that ranks share.
CANDIDATES = ("hierarchical", "ring", "halving_doubling")


class Cost(NamedTuple):
    """A collective of n bytes takes alpha_s + beta_s_per_byte n seconds."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Return what `nbytes` take; nothing takes nothing."""
        return self.alpha_s + self.beta_s_per_byte * nbytes if nbytes else 0.0


class _Load(NamedTuple):
    """Messages at links of one kind.

    Attributes:
        level: of the links.
        bytes_per_s: of each of them.
        messages: [m] places of the messages in their round.
        links: [m] which link each of them crosses.
    """

    level: str
    bytes_per_s: float
    messages: Any
    links: Any


def _loads(cluster: Cluster, each: Round) -> Iterator[_Load]:
    """Yield where the messages of a round go, unless it is one of everyone with everyone."""
    k, far = cluster.ranks_per_host, each.src // cluster.ranks_per_host != each.dst // cluster.ranks_per_host
    inside, outside = np.flatnonzero(~far), np.flatnonzero(far)
    here = _rate(cluster.within, each)
    if cluster.within_is_shared:
        yield _Load("memory", here, inside, each.src[inside] // k)
    else:
        yield _Load("rank out", here, inside, each.src[inside])
        yield _Load("rank in", here, inside, each.dst[inside])
    rate = _rate(cluster.between, each)
    for crossing in cluster.network.crossings(each.src[outside] // k, each.dst[outside] // k):
        messages = outside[crossing.messages]
        yield _Load(crossing.level, crossing.width * rate, messages, crossing.links)


def _messages_on_links(cluster: Cluster, each: Round) -> dict[str, tuple[float, Any]]:
    """Return by level the rate of its links, and [links] how many messages of a round cross each.

    Messages of several hops cross links of the same level after one another: these add up.
    """
    found: dict[str, tuple[float, Any]] = {}
    for load in _loads(cluster, each):
        if len(load.links):
            counts = np.bincount(load.links)
            known = found[load.level][1] if load.level in found else np.zeros(0)
            found[load.level] = load.bytes_per_s, _sum(known, counts)
    return found


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two arrays, of which the shorter one goes on with zeros."""
    size = max(len(one), len(other))
    return np.pad(one, (0, size - len(one))) + np.pad(other, (0, size - len(other)))


def _rate(link: Link, each: Round) -> float:
    return link.bytes_per_s * (1.0 if each.in_frames else link.both_ways)


def round_seconds(cluster: Cluster, each: Round) -> Cost:
    """Return what a round takes, once, for each of its bytes: `nbytes` is what a message has of it."""
    if each.everyone:
        return _everyone_seconds(cluster, each)
    if not len(each.src):
        return Cost(0.0, 0.0)
    busiest = max((on.max() / rate for rate, on in _messages_on_links(cluster, each).values()), default=0.0)
    sent = np.bincount(each.src).max()
    far = (each.src // cluster.ranks_per_host) != (each.dst // cluster.ranks_per_host)
    link = cluster.between if far.any() else cluster.within
    latency = _latencies(cluster, each).max() + sent * link.message_s
    received = np.bincount(each.dst).max() if each.combines else 0
    return Cost(float(latency), float(each.nbytes * (busiest + received * _adding_s(cluster, each))))


def _adding_s(cluster: Cluster, each: Round) -> float:
    """Return what adding a byte takes: two reads and a write; the rate of shared memory has that in it."""
    return 3.0 / cluster.memory_bytes_per_s if each.combines and not cluster.within_is_shared else 0.0


def _everyone_seconds(cluster: Cluster, each: Round) -> Cost:
    network, link, others = cluster.network, cluster.between, cluster.hosts - 1
    latency = network.max_hops(cluster.hosts) * link.latency_s + others * link.message_s
    carried = (
        network.busiest_if_all_send(cluster.hosts) * cluster.ranks_per_host / _rate(cluster.between, each)
    )
    added = others * _adding_s(cluster, each)
    return Cost(latency, each.nbytes * (carried + added))


def _latencies(cluster: Cluster, each: Round) -> Any:
    src, dst = each.src // cluster.ranks_per_host, each.dst // cluster.ranks_per_host
    between = cluster.network.hops(src, dst) * cluster.between.latency_s
    return np.where(src != dst, between, cluster.within.latency_s)


def rounds_of(cluster: Cluster, algorithm: str, nbytes: float, collective: str = "all_reduce") -> list[Round]:
    """Return the rounds of a collective by an algorithm; see `collective_rounds`."""
    return collective_rounds(collective, algorithm, cluster.placement, nbytes)


@lru_cache(maxsize=1024)
def cost_of(cluster: Cluster, algorithm: str, collective: str = "all_reduce") -> Cost:
    """Return what a collective takes by its size."""
    return cost_of_rounds(cluster, rounds_of(cluster, algorithm, 1.0, collective))


def cost_of_rounds(cluster: Cluster, rounds: Sequence[Round]) -> Cost:
    """Return what rounds take one after the other, where they were made for one byte."""
    costs = [(each.repeats, round_seconds(cluster, each)) for each in rounds]
    return Cost(
        sum(repeats * cost.alpha_s for repeats, cost in costs),
        sum(repeats * cost.beta_s_per_byte for repeats, cost in costs),
    )


def check_algorithm(name: str) -> None:
    """Raise InvalidArgument unless an all-reduce is known by this name."""
    if name not in (AUTO, *ALL_REDUCE):
        raise InvalidArgument(f"plan: algorithm={name!r}; expected one of {', '.join((AUTO, *ALL_REDUCE))}")


def fastest(cluster: Cluster, nbytes: float, algorithm: str = AUTO, collective: str = "all_reduce") -> str:
    """Return the algorithm itself, or for `auto` the one that is predicted to take least."""
    if algorithm != AUTO:
        return algorithm
    names = CANDIDATES[:1] if cluster.hosts == 1 else CANDIDATES
    return min(names, key=lambda name: cost_of(cluster, name, collective).seconds(nbytes))


def link_bytes(cluster: Cluster, rounds: Sequence[Round]) -> dict[str, tuple[float, float]]:
    """Return by level of links the bytes that the busiest of them carries, and those that all carry."""
    found: dict[str, Any] = {}
    everyone = 0.0
    for each in rounds:
        if each.everyone:
            everyone += each.repeats * each.nbytes * cluster.ranks_per_host
            continue
        for level, (_, on) in _messages_on_links(cluster, each).items():
            found[level] = _sum(found.get(level, np.zeros(0)), on * each.nbytes * each.repeats)
    carried = {level: (float(per.max()), float(per.sum())) for level, per in found.items() if per.any()}
    if everyone:
        for more in cluster.network.if_all_send(cluster.hosts):
            most, total = carried.get(more.level, (0.0, 0.0))
            carried[more.level] = most + everyone * more.busiest, total + everyone * more.total
    return {level: both for level, both in carried.items() if both[1]}


# -- message by message --------------------------------------------------------------------------------


def simulate_messages(cluster: Cluster, rounds: Sequence[Round]) -> float:
    """Return what rounds take where each message waits only for what its rank has received before."""
    capacities: dict[str, float] = {}
    tasks: list[Task] = []
    last: dict[int, tuple[int, ...]] = {}  # by rank, the tasks that it waits for
    for each in _repeated(cluster, rounds):
        demands: list[dict[str, float]] = [{} for _ in each.src]
        for load in _loads(cluster, each):
            for message, link in zip(load.messages.tolist(), load.links.tolist(), strict=True):
                # A rate that differs by the kind of message is a larger amount of the same link.
                name = f"{load.level} {link}"
                capacity = capacities.setdefault(name, load.bytes_per_s)
                demands[message][name] = each.nbytes * capacity / load.bytes_per_s
        tasks, last = _with_round(cluster, each, demands, tasks, last)
    return max((span.end_s for span in simulate(tasks, capacities)), default=0.0)


def _repeated(cluster: Cluster, rounds: Sequence[Round]) -> Iterator[Round]:
    k = cluster.ranks_per_host
    for each in rounds:
        if each.everyone:
            src, dst = (axis.ravel() for axis in np.divmod(np.arange(cluster.size**2), cluster.size))
            pairs = (src % k == dst % k) & (src != dst)
            each = replace(each, src=src[pairs], dst=dst[pairs], everyone=False)
        for _ in range(each.repeats):
            yield each


def _with_round(
    cluster: Cluster,
    each: Round,
    demands: Sequence[dict[str, float]],
    tasks: list[Task],
    last: dict[int, tuple[int, ...]],
) -> tuple[list[Task], dict[int, tuple[int, ...]]]:
    """Add the messages of a round, and what adding them up takes."""
    arrived: dict[int, list[int]] = {}
    latencies = _latencies(cluster, each).tolist()
    for src, dst, needs, latency in zip(
        each.src.tolist(), each.dst.tolist(), demands, latencies, strict=True
    ):
        after = (*last.get(src, ()),)
        tasks.append(Task(f"{src} to {dst}", needs, after, latency))
        for rank in (src, dst):
            arrived.setdefault(rank, []).append(len(tasks) - 1)
    adding = each.nbytes * _adding_s(cluster, each)
    for rank, places in arrived.items():
        after = tuple(places)
        if adding and (count := int(np.count_nonzero(each.dst == rank))):
            tasks.append(Task(f"{rank} adds", seconds=adding * count, after=after))
            after = (len(tasks) - 1,)
        last[rank] = after
    return tasks, last
