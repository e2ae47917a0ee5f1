"""Local SGD: ranks step by themselves, and every H steps their parameters become the mean.

Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1; post-local and hierarchical: Lin,
Stich, Patel and Jaggi 2020, "Don't Use Large Mini-Batches, Use Local SGD"; growing H: Haddadpour et al. 2019,
"Local SGD with Periodic Averaging"; compressed: Basu et al. 2019, "Qsparse-local-SGD", algorithm 1.

    x_i <- x_i - u(g_i)                 u: the update of the optimizer; in the first `warmup` steps it takes
                                        the mean gradient of all ranks
    x_i <- mean of x_j over all ranks   after every H-th step; `H_host`: over those of a host

Where ranks have unequal numbers n_i of examples between two means, it is that of c_i x_i, c_i = p n_i /
(n_1 + ... + n_p): McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", algorithm 1.

What travels are changes from the last mean y: x_i <- y <- y + mean of (x_j - y), or of C(x_j - y). The x of a
rank that is alone is that mean.

What the optimizer keeps stays each rank's own, or becomes the mean where x_i does: Yu, Jin and Yang 2019, "On
the Linear Speedup Analysis of Communication Efficient Momentum SGD", algorithm 1.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from mpisgd.methods.paper_kit import Paper, Vec, World, alike, evenly, mean, own, part, weighted

__all__ = ["LocalSGD", "State"]


@dataclass(frozen=True)
class State:
    """What is kept."""

    since: int = alike(0)  # steps since the last mean
    H: int = alike(1)  # steps until the next one
    n: dict[int, float] = own(default_factory=dict)  # examples since the last mean
    y: Vec = alike(default_factory=Vec)
    wire: Any = part(lambda: None)
    warmup: Any = part(lambda: None)  # what the compressor keeps of gradients


@dataclass(frozen=True)
class LocalSGD(Paper[State]):
    """H is multiplied by `growth` after each mean, up to `H_max`."""

    weighs = True

    H: int
    H_host: int = 0
    warmup: int = 0
    growth: float = 1.0
    H_max: float = math.inf
    averages_state: bool = False

    def start(self, x: dict[int, Vec], w: World) -> State:
        """See `Paper`."""
        wire = w.wire.start(x, w)
        return State(H=self.H, y=x[w.ranks[0]], wire=wire, warmup=wire)

    def reduce(self, s: State, g: dict[int, Vec], w: World) -> tuple[State, dict[int, Vec]]:
        """See `Paper`."""
        if w.step > self.warmup:
            return s, g
        kept, g = w.wire.reduce(s.warmup, weighted(g, w.weight), evenly(w))
        return replace(s, warmup=kept), g

    def after(self, s: State, x: dict[int, Vec], w: World) -> tuple[State, dict[int, Vec]]:
        """See `Paper`."""
        if w.step <= self.warmup or len(w.ranks) == 1:
            s = replace(s, y=x[w.ranks[0]])
        if w.step <= self.warmup:
            return s, x
        s = replace(s, since=s.since + 1, n={i: s.n.get(i, 0) + w.weight[i] for i in w.ranks})
        if s.since == s.H:
            return self._mean_of_all(s, x, w)
        for host in w.hosts if self.H_host and s.since % self.H_host == 0 else ():
            x = {**x, **dict.fromkeys(host, mean({i: x[i] for i in host}, w))}
            if self.averages_state:
                w.average_state(dict.fromkeys(host, 1))
        return s, x

    def _mean_of_all(self, s: State, x: dict[int, Vec], w: World) -> tuple[State, dict[int, Vec]]:
        changes = weighted({i: x[i] - s.y for i in w.ranks}, s.n)
        wire, change = w.wire.reduce(s.wire, changes, evenly(w))
        if self.averages_state:
            w.average_state(s.n)
        y, H = s.y + change[w.ranks[0]], min(math.ceil(s.H * self.growth), max(self.H_max, self.H))
        return State(H=int(H), y=y, wire=wire, warmup=s.warmup), dict.fromkeys(w.ranks, y)
