"""`tune`: what each algorithm takes, on the ranks of this job and on parts of them.

That is all_reduce by all its algorithms, and those other collectives through shared memory and by MPI's own
call of which either may be quicker on a host.

Groups use the job's profile, so the kinds of groups that a program may make are measured too: the ranks of
one host, and one rank of each host. The hosts' groups run at the same time.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mpisgd
from mpisgd.collectives.algorithms import ALGORITHMS
from mpisgd.collectives.dispatch import TUNED
from mpisgd.core.group import Group
from mpisgd.interfaces.host_transport import HostTransport
from mpisgd.job.lifecycle import world
from mpisgd.job.rank_info import topology
from mpisgd.tools.bench.cases import case_of, powers
from mpisgd.tools.bench.collectives import our_call
from mpisgd.tools.bench.measure import Pace, Timed, measure, slowest
from mpisgd.tools.bench.payload import Payload
from mpisgd.tuning import Curve, MeasuredCurves
from mpisgd.tuning.curve import ALL_REDUCE, FREE_POINTS, fit

__all__ = ["RankSet", "TransportChoice", "contenders", "rank_sets", "to_measure", "tune"]

DTYPES = {False: "float32", True: "bfloat16"}
FIRST_BYTES, FACTOR = 256, 2
LEAST_BYTES = FIRST_BYTES * FACTOR ** (FREE_POINTS - 1)  # so much that there are points for a line
TURN_S, MAX_CALLS, ROUNDS, MIN_ROUNDS = 0.004, 50, 60, 3
# Of a long call in one size: one whose result is checked, one that tells how many make a turn, the rounds.
LEAST_CALLS = 2 + MIN_ROUNDS
# Of the algorithms over messages: what others always beat, and what they beat where a message is cheap.
SLOWER = ("reduce_broadcast",)
SLOWER_ON_A_HOST = ("ring", "halving_doubling", *SLOWER)
LARGE_BYTES = 2**24
SETTLED_BYTES, HOPELESS = 2**16, 2.0


@dataclass(frozen=True)
class RankSet:
    """Ranks to measure on.

    Attributes:
        ranks_per_host: of the group.
        group: None on ranks that only watch.
    """

    ranks_per_host: tuple[int, ...]
    group: Group | None


Best = dict[Curve, dict[int, float]]  # seconds by bytes
Report = Callable[[RankSet, int, dict[Curve, float]], None]


def rank_sets() -> list[RankSet]:
    """Return the sets of ranks of this job, by kind. Collective."""
    nodes, here = topology().nodes, topology()
    found = [RankSet(here.ranks_per_host, world())]
    most = max(here.ranks_per_host)
    if here.num_nodes > 1 and most > 1:
        hosts = [mpisgd.new_group(ranks) for ranks in nodes if len(ranks) == most]
        found.append(RankSet((most,), _mine(hosts)))
        firsts = mpisgd.new_group([ranks[0] for ranks in nodes])
        found.append(RankSet((1,) * here.num_nodes, _mine([firsts])))
    return found


def _mine(groups: Sequence[Group]) -> Group | None:
    return next((group for group in groups if group.rank >= 0), None)


class TransportChoice(NamedTuple):
    """What `to_measure` asks of a transport of host memory; see `HostTransport`.

    Attributes:
        name: of its all-reduce algorithm.
        spans_hosts: whether it is for ranks on several hosts.
        collectives: those of `TUNED` that it takes.
    """

    name: str
    spans_hosts: bool
    collectives: tuple[str, ...]

    @classmethod
    def of(cls, transport: HostTransport) -> "TransportChoice":
        """Return it for a transport of a group."""
        taken = [name for name in TUNED if transport.takes(name, None, LARGE_BYTES)]
        return cls(transport.name, transport.spans_hosts, tuple(taken))


def to_measure(ranks_per_host: Sequence[int], transports: Sequence[TransportChoice]) -> list[Curve]:
    """Return the curves to measure there, without segments.

    Args:
        ranks_per_host: of the ranks.
        transports: which their group has, besides MPI.
    """
    between_hosts = len(ranks_per_host) > 1
    known = [
        (transport.name, num_leaders)
        for transport in transports
        for num_leaders in (sorted({1, min(ranks_per_host)}) if transport.spans_hosts else [1])
    ]
    by_messages = [name for name in ALGORITHMS if name not in (SLOWER if between_hosts else SLOWER_ON_A_HOST)]
    known += [(name, 1) for name in ("mpi", *by_messages)]
    found = [Curve(name, half, num_leaders=num_leaders) for half in DTYPES for name, num_leaders in known]
    for collective in () if between_hosts else TUNED:
        takers = [transport.name for transport in transports if collective in transport.collectives]
        found += [Curve(name, False, collective=collective) for name in (*takers[:1], "mpi") if takers]
    return found


def tune(budget_s: float, last_bytes: int, passes: int, report: Report) -> list[MeasuredCurves]:
    """Measure and fit. Collective.

    The median of a size's rounds passes over what disturbs some of them. A machine may be busy for longer:
    everything is measured in several passes, and the best median counts.

    Args:
        budget_s: seconds for everything; larger sizes are left out where it does not suffice.
        last_bytes: the largest size.
        passes: how often to go through everything.
        report: called with what was measured where: ranks, bytes and medians.
    """
    places = rank_sets()
    best: list[Best] = [{} for _ in places]
    for _ in range(passes):
        for place, found in zip(places, best, strict=True):
            costs = None if place.group is None else place.group.costs
            _pass(place, budget_s / len(places) / passes, last_bytes, found, report)
            if place.group is not None and costs is not None:
                place.group.costs = costs  # by which it chooses: while measured, it was told
    return [
        MeasuredCurves(place.ranks_per_host, tuple(_fitted(*one) for one in found.items()))
        for place, found in zip(places, best, strict=True)
    ]


def _fitted(curve: Curve, seconds: dict[int, float]) -> Curve:
    points = tuple((float(nbytes), seconds[nbytes]) for nbytes in sorted(seconds))
    return replace(curve, segments=fit(points), points=points)


def _pass(place: RankSet, budget_s: float, last_bytes: int, best: Best, report: Report) -> None:
    """Go through the sizes once, as far as the time suffices; put better medians into `best`."""
    group = place.group
    wanted = to_measure(place.ranks_per_host, _common_transports(group))
    sizes = powers(FIRST_BYTES, max(last_bytes, LEAST_BYTES), FACTOR)
    used_s = 0.0
    for done, nbytes in enumerate(sizes):
        started = time.perf_counter()
        medians = _medians(place, wanted, nbytes, (budget_s - used_s) / (len(sizes) - done))
        for curve, seconds in medians.items():
            points = best.setdefault(curve, {})
            points[nbytes] = min(seconds, points.get(nbytes, seconds))
        report(place, nbytes, medians)
        wanted = contenders(wanted, best, nbytes)
        used_s += slowest(time.perf_counter() - started)
        next_s = FACTOR * LEAST_CALLS * sum(medians[curve] for curve in wanted)
        if nbytes >= LEAST_BYTES and used_s + next_s > budget_s:
            return


def contenders(wanted: Sequence[Curve], best: Best, nbytes: int) -> list[Curve]:
    """Return the curves that may still win at sizes above `nbytes`: the time is better spent on those.

    Who takes HOPELESS times as long as the best of its purpose, at this size and the one before, and
    neither is small, is out.
    """
    sizes = [size for size in (nbytes // FACTOR, nbytes) if size >= SETTLED_BYTES]
    if len(sizes) < 2:
        return list(wanted)

    def fastest(purpose: tuple[str, bool], size: int) -> float:
        return min(best[curve][size] for curve in wanted if curve.purpose == purpose)

    return [
        curve
        for curve in wanted
        if any(best[curve][size] < HOPELESS * fastest(curve.purpose, size) for size in sizes)
    ]


def _common_transports(group: Group | None) -> list[TransportChoice]:
    """Return those that the groups of all ranks have, where they are in one. Collective over the job."""
    own = None if group is None else [TransportChoice.of(transport) for transport in group.transports]
    told: list[list[TransportChoice] | None] = [None] * mpisgd.size()
    mpisgd.all_gather_object(told, own)
    first, *others = (found for found in told if found is not None)
    return [transport for transport in first if all(transport in found for found in others)]


def _medians(place: RankSet, wanted: Sequence[Curve], nbytes: int, budget_s: float) -> dict[Curve, float]:
    """Return the seconds of a call by curve, those of a purpose in turns. Collective."""
    found: dict[Curve, float] = {}
    purposes = list(dict.fromkeys(curve.purpose for curve in wanted))
    pace = Pace(ROUNDS, MIN_ROUNDS, budget_s / len(purposes), TURN_S, MAX_CALLS)
    for collective, half in purposes:
        case = case_of(collective, DTYPES[half], nbytes, sum(place.ranks_per_host))
        payload = None if place.group is None else Payload(case, place.group.rank)
        alike = [curve for curve in wanted if curve.purpose == (collective, half)]
        seconds = measure([_timed(curve, place.group, payload) for curve in alike], pace).seconds
        found |= {curve: statistics.median(seconds[curve.name]) for curve in alike}
    return found


def _timed(curve: Curve, group: Group | None, payload: Payload | None) -> Timed:
    """Return the function that measures a curve; on a rank outside the group one that does nothing."""
    if group is None or payload is None:
        return Timed(curve.name, lambda: None, ours=True)
    transports, only = group.transports, group.costs.only(curve.algorithm, curve.collective)
    algorithm = curve.algorithm if curve.collective == ALL_REDUCE else "auto"
    collective = our_call(payload, group, algorithm)

    def call() -> None:
        for transport in transports:
            transport.use_leaders(lambda nbytes, half: curve.num_leaders)
        group.costs = only
        collective()

    return Timed(curve.name, call, payload, ours=True)
