"""What a collective takes on a cluster, in closed form: at any number of ranks.

The most loaded link on its way is what a message waits for:

    seconds(message) = latency + bytes of the messages that come to that link with it or later / its rate

A rank is done with a round when what it sends and receives has arrived and is added up, and then begins the
next one; so ranks of a tree go on without those that are still busy elsewhere. A collective of n bytes takes
the longest way through its rounds, which is a maximum of some alpha + beta n: few lines, found once.

`by_message.simulate_messages` is the check of all this: it knows neither most loaded links nor longest ways.
Where ranks come to a link in different rounds there is no such form: see `late_ranks`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpisgd.errors import InvalidArgument
from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.network import Placement
from mpisgd.tools.plan.simulation.costs import Cost, Costs, upper_lines
from mpisgd.tools.plan.simulation.late_ranks import LateRanks, are_late
from mpisgd.tools.plan.simulation.messages import ALL_REDUCE, HALVES, Round, collective_rounds
from mpisgd.tools.plan.simulation.roads import Roads, Way, roads_of, sum_of, way_of

__all__ = [
    "AUTO",
    "CANDIDATES",
    "busiest_bytes",
    "check_algorithm",
    "cost_of",
    "cost_of_rounds",
    "fastest",
    "link_bytes",
    "round_seconds",
]

Array = Any  # numpy's
AUTO = "auto"
# What `auto` takes of, as mpisgd does between hosts. On one host all of them are memory that ranks share.
CANDIDATES = ("hierarchical", "ring", "halving_doubling")


# How many times what is simulated the closed form can be, where ranks are late.
OFF = 1.5


def _rate(link: Link, each: Round) -> float:
    return link.bytes_per_s * (1.0 if each.in_frames else link.both_ways)


# -- what a round takes --------------------------------------------------------------------------------


class _Timing(NamedTuple):
    """What the messages of a round take, of a collective of one byte.

    Attributes:
        alpha_s: [m] of each message, until its bytes flow.
        beta_s: [m] while they do.
        adding_s: [ranks] what adding up takes then.
        is_single: whether no rank sends two messages, nor receives two.
        is_equal: whether all ranks have the same to do.
        adds: whether adding up takes any time.
    """

    alpha_s: Array
    beta_s: Array
    adding_s: Array
    is_single: bool
    is_equal: bool
    adds: bool

    def lines(self, dst: Array) -> list[Cost]:
        """Return the costs of messages to ranks `dst`, but those that another exceeds at every size."""
        if self.is_equal:
            return [Cost(float(self.alpha_s[0]), float(self.beta_s[0] + self.adding_s[0]))]
        alpha_s, beta_s = self.alpha_s, self.beta_s + self.adding_s[dst]
        order = np.lexsort((beta_s, alpha_s))[::-1]  # the longest latency first
        most = np.maximum.accumulate(beta_s[order])
        counts = order[np.append(True, most[1:] > most[:-1])]  # no other one has both longer
        return [Cost(*line) for line in zip(alpha_s[counts].tolist(), beta_s[counts].tolist(), strict=True)]


def _timing(cluster: Cluster, each: Round, way: Way, together: int = 1) -> _Timing:
    """Return the cost of the messages, where so many ranks of a host send the same over its link."""

    def of_links(attribute: Callable[[Link], float]) -> Array:
        return np.where(way.is_far, attribute(cluster.between), attribute(cluster.within))

    alpha_s = way.hops * of_links(lambda link: link.latency_s)
    alpha_s += way.place * of_links(lambda link: link.message_s)
    beta_s = each.nbytes * way.busy * together / of_links(lambda link: _rate(link, each))
    adding_s = way.received * (each.nbytes * _adding_s(cluster, each))
    is_single = bool((way.sent <= 1).all() and (way.received <= 1).all())
    is_equal = all(map(_are_equal, (alpha_s, beta_s, way.sent, way.received)))
    return _Timing(alpha_s, beta_s, adding_s, is_single, is_equal, bool(adding_s.any()))


def _are_equal(numbers: Array) -> bool:
    return len(numbers) > 0 and bool(numbers.min() == numbers.max())


def _adding_s(cluster: Cluster, each: Round) -> float:
    """Return the seconds of adding a byte: two reads and a write, as in the rate of shared memory."""
    return 3.0 / cluster.memory_bytes_per_s if each.combines and not cluster.within_is_shared else 0.0


def round_seconds(cluster: Cluster, each: Round) -> Cost:
    """Return the latency of a round and its seconds per byte; a message has `nbytes` of it."""
    timing = _timing(cluster, each, way_of(roads_of(cluster), each))
    return Cost(float(timing.alpha_s.max()), float(timing.beta_s.max() + timing.adding_s.max()))


def _everyone_seconds(cluster: Cluster, each: Round) -> list[Cost]:
    """Return lines of a round of everyone with everyone on many hosts: of messages of so many hops or more.

    These begin to flow together, so a link that so many of them cross is busy from then on: with all of them
    when each rank has sent its first message, and with the last of each when it has sent all.
    """
    link, others, k = cluster.between, cluster.hosts - 1, cluster.ranks_per_host
    added = others * _adding_s(cluster, each)
    return [
        Cost(
            hops * link.latency_s + sent * link.message_s,
            each.nbytes * (busiest * (others - sent + 1) / others * k / _rate(link, each) + added),
        )
        for hops, busiest in cluster.network.busiest_by_hops(cluster.hosts)
        for sent in {1, others}
    ]


# -- the longest way through rounds --------------------------------------------------------------------


class _Clocks:
    """When each rank is done, as alpha + beta n, for one n; and in seconds."""

    def __init__(self, size: int, nbytes: float) -> None:
        self._alpha, self._beta, self._seconds = np.zeros(size), np.zeros(size), np.zeros(size)
        self._nbytes = nbytes
        self._are_together = True  # whether all of them are the same

    def go(self, each: Round, timing: _Timing) -> None:
        """Let the messages of a round go, as often as they do."""
        if each.repeats > 1 or (timing.is_equal and self._are_together):
            # In a long row of rounds the slowest message is what all come to wait for.
            self.together(timing.lines(each.dst), each.repeats)
        elif len(each.src):
            self.messages(each, timing)

    def together(self, lines: Sequence[Cost], repeats: int) -> None:
        """Let all ranks begin at the same time, and take the same."""
        last, line = self.last(), max(lines, key=lambda line: line.seconds(self._nbytes))
        self._alpha[:] = last.alpha_s + repeats * line.alpha_s
        self._beta[:] = last.beta_s_per_byte + repeats * line.beta_s_per_byte
        self._seconds = self._alpha + self._beta * self._nbytes
        self._are_together = True

    def messages(self, each: Round, timing: _Timing) -> None:
        """Let every message go: its bytes flow when it is at its receiver's, and this one is ready."""
        src, dst, self._are_together = each.src, each.dst, False
        is_left = self._seconds[src] + timing.alpha_s > self._seconds[dst]
        alpha = np.where(is_left, self._alpha[src] + timing.alpha_s, self._alpha[dst])
        beta = np.where(is_left, self._beta[src], self._beta[dst]) + timing.beta_s
        seconds = alpha + beta * self._nbytes
        # Both sides are busy until then, which is later than what they have done before.
        if timing.is_single:
            self._set(src, alpha, beta, seconds)
            is_later = seconds > self._seconds[dst]
            self._set(dst[is_later], alpha[is_later], beta[is_later], seconds[is_later])
        else:
            order = np.argsort(seconds, kind="stable")  # of several, the last one is kept
            sides = np.column_stack((src[order], dst[order])).ravel()
            self._set(sides, *(np.repeat(end[order], 2) for end in (alpha, beta, seconds)))
        if timing.adds:
            self._beta += timing.adding_s
            self._seconds += timing.adding_s * self._nbytes

    def _set(self, ranks: Array, alpha: Array, beta: Array, seconds: Array) -> None:
        self._alpha[ranks], self._beta[ranks], self._seconds[ranks] = alpha, beta, seconds

    def last(self) -> Cost:
        """Return when the last rank is done."""
        rank = int(np.argmax(self._seconds))
        return Cost(float(self._alpha[rank]), float(self._beta[rank]))


# Of more hosts the messages of everyone to everyone are not listed.
MOST_HOSTS = 512


@lru_cache(maxsize=16)
def _all_met(roads: Roads, algorithm: str) -> list[tuple[Round, Way | None]]:
    """Return the rounds of an all-reduce of one byte, and what their messages meet."""
    known: dict[tuple[int, int, bool], tuple[Round, Way | None]] = {}
    found = []
    for each in collective_rounds("all_reduce", algorithm, roads.place, 1.0):
        key = id(each.src), id(each.dst), each.everyone  # a round and the same backwards have ranks in common
        if key not in known:
            known[key] = _listed(roads, each)
        listed, way = known[key]
        found.append((replace(each, src=listed.src, dst=listed.dst), way))
    return found


def _met(cluster: Cluster, algorithm: str, collective: str) -> list[tuple[Round, Way | None]]:
    """Return the same of a collective, which is an all-reduce or a half of it."""
    met = _all_met(roads_of(cluster), algorithm)
    return [(each, way) for each, way in met if HALVES[collective] in (None, each.combines)]


def _listed(roads: Roads, each: Round) -> tuple[Round, Way | None]:
    """Return a round with its messages, and what they meet: of all hosts one rank, or of one host all."""
    place = roads.place
    if each.everyone:
        place = Placement(place.hosts, 1)
        if place.size > MOST_HOSTS:
            return each, None
    elif each.on_each_host:
        place = Placement(1, place.ranks_per_host)
    listed = each.listed(place)
    return replace(each, src=listed.src, dst=listed.dst), way_of(replace(roads, place=place), listed)


def cost_of_rounds(cluster: Cluster, rounds: Sequence[Round]) -> tuple[Costs, dict[str, float]]:
    """Return the time of rounds one after the other, and by level the bytes on its busiest link.

    Where they were made for one byte: for each byte of a message.
    """
    roads = roads_of(cluster)
    met = [_listed(roads, each) for each in rounds]
    return _longest(cluster, met), _busiest(cluster, met)


def _longest(cluster: Cluster, met: Sequence[tuple[Round, Way | None]]) -> Costs:
    by_host = any(each.everyone for each, _ in met)  # all ranks of a host do the same
    size, together = (cluster.hosts, cluster.ranks_per_host) if by_host else (cluster.size, 1)
    timings: list[_Timing | list[Cost]] = []
    for each, way in met:
        if way is None:
            timings.append(_everyone_seconds(cluster, each))
            continue
        timing = _timing(cluster, each, way, together if each.everyone else 1)
        timings.append(timing.lines(each.dst) if by_host and not each.everyone else timing)
    if len(timings) == 1 and isinstance(timings[0], _Timing):  # nobody comes late to a single round
        each, lines = met[0][0], timings[0].lines(met[0][0].dst)
        return upper_lines(Costs(tuple(Cost(*(each.repeats * part for part in line)) for line in lines)).at)
    steps = [(each, timing) for (each, _), timing in zip(met, timings, strict=True)]
    if not by_host and (alike := _one_of_each_host(steps, cluster.ranks_per_host)) is not None:
        size, steps = cluster.hosts, alike

    def line_at(nbytes: float) -> Cost:
        clocks = _Clocks(size, nbytes)
        for each, timing in steps:
            if isinstance(timing, _Timing):
                clocks.go(each, timing)
            else:
                clocks.together(timing, each.repeats)
        return clocks.last()

    return upper_lines(line_at)


def _one_of_each_host(
    steps: Sequence[tuple[Round, _Timing | list[Cost]]], k: int
) -> list[tuple[Round, _Timing | list[Cost]]] | None:
    """Return the rounds with a host's first rank for all of its `k`; None: these are not alike in all rounds.

    Those of halving and doubling are where `k` is a power of two: all of a host send to the same host.
    """
    found: list[tuple[Round, _Timing | list[Cost]]] = []
    for each, timing in steps:
        if k == 1 or not isinstance(timing, _Timing) or len(each.src) % k:
            return None
        src, dst = each.src // k, each.dst // k
        if (each.src[::k] % k).any() or not all(
            (rows == rows[:, :1]).all() for rows in (part.reshape(-1, k) for part in (src, dst, *timing[:3]))
        ):
            return None
        alpha_s, beta_s, adding_s = (part[::k] for part in timing[:3])
        first = timing._replace(alpha_s=alpha_s, beta_s=beta_s, adding_s=adding_s)
        found.append((replace(each, src=src[::k], dst=dst[::k]), first))
    return found


# -- collectives ---------------------------------------------------------------------------------------


def cost_of(cluster: Cluster, algorithm: str, collective: str = "all_reduce") -> Costs | LateRanks:
    """Return the time of a collective by its size."""
    form = form_of(cluster, algorithm, collective)
    return LateRanks(cluster, algorithm, collective, form) if are_late(cluster, algorithm) else form


@lru_cache(maxsize=1024)
def form_of(cluster: Cluster, algorithm: str, collective: str = "all_reduce") -> Costs:
    """Return the same in closed form, wherever ranks are late."""
    return _longest(cluster, _met(cluster, algorithm, collective))


def check_algorithm(name: str) -> None:
    """Raise InvalidArgument unless an all-reduce is known by this name."""
    if name not in (AUTO, *ALL_REDUCE):
        raise InvalidArgument(f"plan: algorithm={name!r}; expected one of {', '.join((AUTO, *ALL_REDUCE))}")


def fastest(cluster: Cluster, nbytes: float, algorithm: str = AUTO, collective: str = "all_reduce") -> str:
    """Return the algorithm itself, or for `auto` the one that is predicted to take least."""
    if algorithm != AUTO:
        return algorithm
    if cluster.hosts == 1:
        return CANDIDATES[0]

    def form_s(name: str) -> float:
        return form_of(cluster, name, collective).seconds(nbytes)

    forms = {name: form_s(name) for name in CANDIDATES[:-1]}
    last, least = CANDIDATES[-1], min(forms.values())
    if _least_of_halving_s(cluster, nbytes, collective) < least:
        forms[last] = form_s(last)
    # What is far behind need not be simulated.
    near = [name for name, seconds in forms.items() if seconds <= OFF * least]
    return min(near, key=lambda name: cost_of(cluster, name, collective).seconds(nbytes))


def _least_of_halving_s(cluster: Cluster, nbytes: float, collective: str) -> float:
    """Return a lower bound of halving and doubling: its messages to other hosts, if no two ever meet.

    On many ranks its form takes a second, and it is seldom the best.
    """
    link, k = cluster.between, cluster.ranks_per_host
    power = 1 << (cluster.size.bit_length() - 1)
    distances = [1 << bit for bit in range(power.bit_length() - 1) if 1 << bit >= k]
    alpha_s = len(distances) * (link.latency_s + link.message_s)
    bytes_s = nbytes * sum(distances) / power * k / cluster.network.links_of_host / link.bytes_per_s
    return (alpha_s + bytes_s) * (2 if collective == "all_reduce" else 1)


def link_bytes(cluster: Cluster, rounds: Sequence[Round]) -> dict[str, tuple[float, float]]:
    """Return by level of links the bytes that the busiest of them carries, and those that all carry."""
    roads = roads_of(cluster)
    return _link_bytes(cluster, [_listed(roads, each) for each in rounds])


@lru_cache(maxsize=1024)
def busiest_bytes(cluster: Cluster, algorithm: str, collective: str = "all_reduce") -> dict[str, float]:
    """Return by level the bytes that its busiest link carries for each byte of a collective."""
    return _busiest(cluster, _met(cluster, algorithm, collective))


def _busiest(cluster: Cluster, met: Sequence[tuple[Round, Way | None]]) -> dict[str, float]:
    return {level: most for level, (most, _) in _link_bytes(cluster, met).items()}


def _link_bytes(cluster: Cluster, met: Sequence[tuple[Round, Way | None]]) -> dict[str, tuple[float, float]]:
    found: dict[str, Any] = {}
    everyone, k = 0.0, cluster.ranks_per_host
    for each, way in met:
        nbytes = each.repeats * each.nbytes * (k if each.everyone else 1)
        if way is None:
            everyone += nbytes
            continue
        alike = cluster.hosts if each.on_each_host else 1
        for level, on in way.on_links.items():
            found[level] = sum_of(found.get(level, np.zeros(0)), np.tile(on * nbytes, alike))
    carried = {level: (float(per.max()), float(per.sum())) for level, per in found.items() if per.any()}
    if everyone:
        for more in cluster.network.if_all_send(cluster.hosts):
            most, total = carried.get(more.level, (0.0, 0.0))
            carried[more.level] = most + everyone * more.busiest, total + everyone * more.total
    return {level: both for level, both in carried.items() if both[1]}
