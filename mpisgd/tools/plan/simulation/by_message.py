"""`simulate_messages`: what a collective takes, message by message: the check of all closed forms.

It shares nothing with them but the rounds, which say who sends what to whom. A message is walked from link to
link here, in plain steps; links are shared by max-min fairness, as in `engine`, from event to event:

    sender ready  --- message_s, of each message so far --- latency of the hops ---+
    receiver ready ----------------------------------------------------------------+-> bytes flow

A rank is ready for a round when all that it sends and receives in the rounds before has arrived and is added
up. So the bytes of a message wait for the receiver, as those of MPI's rendezvous do, and ranks run ahead of
others where the rounds let them. Thousands of messages flow at the same time, so rates are found with numpy.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.network import FatTree, Torus
from mpisgd.tools.plan.simulation.messages import Round

__all__ = ["simulate_messages"]

SAME = 1e-9  # rounding parts what is equal


def simulate_messages(cluster: Cluster, rounds: Sequence[Round], same: float = SAME) -> float:
    """Return the seconds until the last rank is done; for some hundred ranks.

    Args:
        cluster: of the ranks.
        rounds: one after the other.
        same: events as near to each other, relative to the time so far, are one event: 1e-3 is ten times as
            quick where ranks are apart, and less exact by as much.
    """
    return _Simulation(cluster, rounds, same).run()


class _Message(NamedTuple):
    """A message of a round.

    Attributes:
        dst: who receives it.
        latency_s: from the moment when its sender is ready for the round until its bytes can flow.
        path: the place of its links in the simulation's table.
        nbytes: as many bytes as it makes of a link: more, where the link is slower for this kind of message.
    """

    dst: int
    latency_s: float
    path: int
    nbytes: float


class _Links:
    """The links of a cluster, as messages come to them, and which of them each message crosses."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._places: dict[tuple[int, int], int] = {}
        self.capacities: list[float] = []
        self.paths: list[list[int]] = []

    def path(self, src: int, dst: int) -> int:
        """Return the place of the links between two ranks in `paths`."""
        k, both = self._cluster.ranks_per_host, (src, dst)
        if src // k != dst // k:
            both = (-1 - src // k, -1 - dst // k)  # ranks of a host share the way to another one
        if both not in self._places:
            self._places[both] = len(self.paths)
            self.paths.append([self._number(*link) for link in self._walk(src, dst)])
        return self._places[both]

    def _number(self, name: tuple[Any, ...], bytes_per_s: float) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.capacities)
            self.capacities.append(bytes_per_s)
        return self._numbers[name]

    def _walk(self, src: int, dst: int) -> Iterator[tuple[tuple[Any, ...], float]]:
        """Yield the links that a message crosses, by name, and their rates."""
        cluster, k = self._cluster, self._cluster.ranks_per_host
        rate, here, there = cluster.between.bytes_per_s, src // k, dst // k
        if here == there and cluster.within_is_shared:
            yield ("memory", here), cluster.within.bytes_per_s
        elif here == there:
            yield ("from rank", src), cluster.within.bytes_per_s
            yield ("to rank", dst), cluster.within.bytes_per_s
        elif isinstance(cluster.network, Torus):
            for corner, next_corner in walk_torus(cluster.network.shape, here, there):
                yield ("torus", corner, next_corner), rate
        else:
            yield ("from host", here), rate
            yield ("to host", there), rate
            if isinstance(cluster.network, FatTree):
                per_leaf = cluster.network.hosts_per_switch
                if here // per_leaf != there // per_leaf:
                    uplink = rate * per_leaf / cluster.network.oversubscription
                    yield ("up", here // per_leaf), uplink
                    yield ("down", there // per_leaf), uplink


def walk_torus(shape: Sequence[int], src: int, dst: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the links on the way: pairs of neighbours, by their coordinates."""
    here, there = list(coordinates(shape, src)), coordinates(shape, dst)
    for dim, length in enumerate(shape):
        while here[dim] != there[dim]:
            ahead = (there[dim] - here[dim]) % length
            begun = tuple(here)
            here[dim] = (here[dim] + (1 if ahead <= length - ahead else -1)) % length
            yield begun, tuple(here)


def coordinates(shape: Sequence[int], host: int) -> tuple[int, ...]:
    """Return where a host is; the last coordinate counts fastest."""
    found: list[int] = []
    for length in reversed(shape):
        host, rest = divmod(host, length)
        found.append(rest)
    return tuple(reversed(found))


class _Plan(NamedTuple):
    """The messages of a round.

    Attributes:
        sent: by sender.
        num: how many messages a rank sends or receives.
        adding_s: what a rank adds up when they are there.
    """

    sent: dict[int, list[_Message]]
    num: dict[int, int]
    adding_s: dict[int, float]


class _Simulation:
    """The state between two events."""

    def __init__(self, cluster: Cluster, rounds: Sequence[Round], same: float) -> None:
        self._cluster, self._links, self._same = cluster, _Links(cluster), same
        self._plans = [plan for each in rounds for plan in [self._plan(each)] * each.repeats]
        width = max(map(len, self._links.paths), default=0)
        free = len(self._links.capacities)  # a link that is never full, for shorter ways
        self._paths = np.array([path + [free] * (width - len(path)) for path in self._links.paths])
        self._capacities = np.array([*self._links.capacities, math.inf])
        self._now = 0.0
        self._due: list[tuple[float, int, int, int]] = []  # when, rank, round, message or -1: ready
        self._round = dict.fromkeys(range(cluster.size), -1)  # that a rank is in, or has ended
        self._left: dict[int, int] = {}
        self._early: dict[tuple[int, int], list[tuple[int, _Message]]] = defaultdict(list)
        self._flows: list[tuple[int, int]] = []  # sender and receiver of what flows
        self._path_of, self._bytes_left = np.empty(0, np.int64), np.empty(0)
        self._new_paths: list[int] = []  # of flows that have begun since the last event
        self._new_bytes: list[float] = []

    def _plan(self, each: Round) -> _Plan:
        cluster, k = self._cluster, self._cluster.ranks_per_host
        each = each.listed(cluster.placement)
        pairs = list(zip(each.src.tolist(), each.dst.tolist(), strict=True))
        sent: dict[int, list[_Message]] = defaultdict(list)
        num: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        for src, dst in pairs:
            link = cluster.between if src // k != dst // k else cluster.within
            path = self._links.path(src, dst)
            hops = 1
            if isinstance(cluster.network, Torus) and src // k != dst // k:
                hops = len(self._links.paths[path])
            latency_s = hops * link.latency_s + (len(sent[src]) + 1) * link.message_s
            slower = 1.0 if each.in_frames else 1.0 / link.both_ways
            sent[src].append(_Message(dst, latency_s, path, each.nbytes * slower))
            num[src] += 1
            num[dst] += 1
            received[dst] += 1
        adds = each.combines and not cluster.within_is_shared  # the rate of shared memory has it in it
        adding = 3.0 * each.nbytes / cluster.memory_bytes_per_s if adds else 0.0
        return _Plan(sent, num, {rank: count * adding for rank, count in received.items()})

    def run(self) -> float:
        """Go from event to event until nothing is left."""
        for rank in range(self._cluster.size):
            self._go_on(rank)
        while self._due or self._flows:
            rates = self._rates()
            times = [*(due[0] for due in self._due[:1]), *(self._now + self._bytes_left / rates).tolist()]
            self._bytes_left = self._bytes_left - rates * (min(times) - self._now)
            self._now = min(times)
            self._end_flows(rates)
            self._start_due()
        return self._now

    def _go_on(self, rank: int) -> None:
        """Let a rank begin the next round in which it has something to do."""
        number = self._round[rank] + 1
        while number < len(self._plans) and not self._plans[number].num.get(rank):
            number += 1
        self._round[rank] = number
        if number == len(self._plans):
            return
        plan = self._plans[number]
        self._left[rank] = plan.num[rank]
        for place, message in enumerate(plan.sent.get(rank, ())):
            heapq.heappush(self._due, (self._now + message.latency_s, rank, number, place))
        for src, message in self._early.pop((rank, number), ()):
            self._flow(src, message)

    def _start_due(self) -> None:
        while self._due and self._due[0][0] <= self._now * (1 + self._same):
            _, rank, number, place = heapq.heappop(self._due)
            if place < 0:
                self._go_on(rank)
                continue
            message = self._plans[number].sent[rank][place]
            if self._round[message.dst] == number:
                self._flow(rank, message)
            else:
                self._early[message.dst, number].append((rank, message))
        if self._new_paths:
            self._path_of = np.append(self._path_of, self._new_paths)
            self._bytes_left = np.append(self._bytes_left, self._new_bytes)
            self._new_paths, self._new_bytes = [], []

    def _flow(self, src: int, message: _Message) -> None:
        self._flows.append((src, message.dst))
        self._new_paths.append(message.path)
        self._new_bytes.append(message.nbytes)

    def _rates(self) -> Any:
        """Return the max-min fair rate of each message that flows: the fullest link is shared out first."""
        paths = self._paths[self._path_of] if len(self._path_of) else np.empty((0, 1), np.int64)
        rates, size = np.zeros(len(paths)), len(self._capacities)
        left, free = np.arange(len(paths)), self._capacities.copy()
        while len(left):
            users = np.bincount(paths[left].ravel(), minlength=size)
            shares = np.full(size, math.inf)
            np.divide(free, users, out=shares, where=users > 0)
            level = shares.min()
            settled = (shares <= level * (1 + SAME))[paths[left]].any(axis=1)
            rates[left[settled]] = level
            free -= level * np.bincount(paths[left[settled]].ravel(), minlength=size)
            free[:-1] = np.maximum(free[:-1], 0.0)
            left = left[~settled]
        return rates

    def _end_flows(self, rates: Any) -> None:
        done = self._bytes_left <= rates * (self._same * max(self._now, 1e-30))
        if not done.any():
            return
        self._path_of, self._bytes_left = self._path_of[~done], self._bytes_left[~done]
        ended = [flow for flow, is_done in zip(self._flows, done.tolist(), strict=True) if is_done]
        self._flows = [flow for flow, is_done in zip(self._flows, done.tolist(), strict=True) if not is_done]
        for rank in (rank for flow in ended for rank in flow):
            self._left[rank] -= 1
            if not self._left[rank]:
                adding_s = self._plans[self._round[rank]].adding_s.get(rank, 0.0)
                heapq.heappush(self._due, (self._now + adding_s, rank, self._round[rank], -1))
