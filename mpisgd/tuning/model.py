"""`CostModel`: which algorithm is predicted to be fastest.

Groups use the profile of the job they are part of, and nobody measures every group. What carries over to
other ranks is latency per step and bandwidth per byte on the busiest link; what changes is how many steps an
algorithm takes there, and what its links carry.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mpisgd.tuning.curve import ALL_REDUCE, Curve, LineSegment

__all__ = ["CostModel", "MeasuredCurves", "kind", "link_share", "num_steps"]

MAX_REMEMBERED = 4096
CLEARLY = 0.9  # of the time of another; what machines do from run to run differs by as much


@dataclass(frozen=True)
class MeasuredCurves:
    """Curves of one set of ranks.

    Attributes:
        ranks_per_host: how many there were on each host, more than one in all.
        curves: one for each collective, algorithm, kind of dtype and number of num_leaders.
    """

    ranks_per_host: tuple[int, ...]
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class CostModel:
    """Predicts what a collective takes; every rank with the same model chooses the same.

    It predicts for `ranks_per_host`, from measurements of the most similar ranks: of one host, of hosts with
    one rank each, or of hosts with several. Where those were other numbers of ranks, latency is taken to grow
    with the number of steps, and time per byte with what the busiest link carries (2(h-1)/h of the tensor
    for `hierarchical` on h hosts). That is right for links; on one host it takes cores and memory to grow
    with the ranks, and the sizes of caches to stay.

    Attributes:
        source: where it comes from, for people.
        measured: at most one for each kind of ranks.
        ranks_per_host: what is predicted for.
    """

    source: str
    measured: tuple[MeasuredCurves, ...]
    ranks_per_host: tuple[int, ...] = (1,)

    def at(self, ranks_per_host: Sequence[int]) -> "CostModel":
        """Return the model for other ranks."""
        return replace(self, ranks_per_host=tuple(ranks_per_host))

    def completed(self, other: "CostModel") -> "CostModel":
        """Return this model, with what `other` has measured of kinds of ranks that are missing here."""
        known = {kind(own.ranks_per_host) for own in self.measured}
        more = [theirs for theirs in other.measured if kind(theirs.ranks_per_host) not in known]
        return replace(self, measured=(*self.measured, *more))

    def choose(
        self, candidates: tuple[str, ...], nbytes: int, half: bool = False, collective: str = ALL_REDUCE
    ) -> str:
        """Return the first candidate, unless another one is predicted to be clearly faster.

        Args:
            candidates: algorithms, at least one; those nobody has measured come last.
            nbytes: of the tensor.
            half: whether it is float16 or bfloat16.
            collective: what is to be done.
        """
        asked = (candidates, nbytes, half, collective)
        known = self._chosen.get(asked)
        if known is None:
            if len(self._chosen) >= MAX_REMEMBERED:
                self._chosen.clear()
            first = candidates[0]
            seconds = {name: self.seconds(name, nbytes, half, collective) for name in candidates}
            fastest = min(candidates, key=seconds.__getitem__)
            known = fastest if seconds[fastest] < CLEARLY * seconds[first] else first
            self._chosen[asked] = known
        return known

    def num_leaders(self, nbytes: int, half: bool = False) -> int:
        """Return how many ranks of each host should send over the link in `hierarchical`."""
        curves = self._curves.get(("hierarchical", half, ALL_REDUCE), ())
        fastest = min(curves, key=lambda curve: curve.seconds(nbytes), default=None)
        return 1 if fastest is None else fastest.num_leaders

    def seconds(self, algorithm: str, nbytes: int, half: bool = False, collective: str = ALL_REDUCE) -> float:
        """Predict the seconds that `algorithm` takes, infinite where nobody has measured it."""
        curves = self._curves.get((algorithm, half, collective), ())
        return min((curve.seconds(nbytes) for curve in curves), default=float("inf"))

    @cached_property
    def collectives(self) -> frozenset[str]:
        """Those that have been measured on similar ranks."""
        return frozenset(collective for _, _, collective in self._curves)

    def only(self, algorithm: str, collective: str) -> "CostModel":
        """Return a model by which these ranks have no choice."""
        curve = Curve(algorithm, False, (LineSegment(math.inf, 0.0, 0.0),), collective=collective)
        return replace(self, measured=(MeasuredCurves(self.ranks_per_host, (curve,)),))

    @cached_property
    def _chosen(self) -> dict[tuple[tuple[str, ...], int, bool, str], str]:
        """Earlier choices: a small message takes less time than a prediction."""
        return {}

    @cached_property
    def _curves(self) -> dict[tuple[str, bool, str], list[Curve]]:
        """The curves of similar ranks as they would be here, by algorithm, kind of dtype and collective."""
        found: dict[tuple[str, bool, str], list[Curve]] = {}
        for measured in self.measured:
            if kind(measured.ranks_per_host) == kind(self.ranks_per_host):
                here, there = self.ranks_per_host, measured.ranks_per_host
                for curve in measured.curves:
                    alpha = num_steps(curve.algorithm, here) / num_steps(curve.algorithm, there)
                    beta = link_share(curve.algorithm, here) / link_share(curve.algorithm, there)
                    num_leaders = 1 if curve.num_leaders == 1 else min(here)
                    key = (curve.algorithm, curve.half, curve.collective)
                    found.setdefault(key, []).append(curve.scaled(alpha, beta, num_leaders))
        return found


def kind(ranks_per_host: Sequence[int]) -> str:
    """Return the kind of a group, within which costs compare: one host, hosts of a rank, hosts of several."""
    if len(ranks_per_host) == 1:
        return "one host"
    return "one rank per host" if max(ranks_per_host) == 1 else "several ranks per host"


def link_share(algorithm: str, ranks_per_host: Sequence[int]) -> float:
    """Return the bytes that the busiest host sends over its link, for each byte of the tensor.

    On one host every rank counts as a host: the link is its way to memory. MPI is taken to be hierarchical.
    """
    size = sum(ranks_per_host)
    per_link = ranks_per_host if len(ranks_per_host) > 1 else [1] * size
    hosts, most = len(per_link), max(per_link)
    if algorithm == "ring":  # crosses each link once, if hosts hold neighbours
        return 2 * (size - 1) / size
    if algorithm == "all_to_all":  # every rank of a host sends over the one link
        return 2 * most * (size - most) / size
    if algorithm == "halving_doubling":  # so here; ranks beyond a power of two send and get everything
        power, extra = _power_of_two(size)
        return 2 * most * max(0, power - most) / power + min(most, extra)
    return 2 * (hosts - 1) / hosts


def num_steps(algorithm: str, ranks_per_host: Sequence[int]) -> int:
    """Return how many messages, or barriers, come one after the other."""
    size, hosts = sum(ranks_per_host), len(ranks_per_host)
    if algorithm in ("ring", "all_to_all"):
        return 2 * (size - 1)
    if algorithm == "halving_doubling":
        power, extra = _power_of_two(size)
        return 2 * (power.bit_length() - 1) + 2 * (extra > 0)
    return math.ceil(math.log2(size if hosts == 1 else hosts))


def _power_of_two(size: int) -> tuple[int, int]:
    """Return the largest power of two that is not above `size`, and the rest."""
    power = 1 << (size.bit_length() - 1)
    return power, size - power
