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

What travels are changes from the last mean y: x_i <- y <- y + mean of (x_j - y), or of C(x_j - y).
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

    def start(self, x: dict[int, Vec], w: World) -> State:
        """See `Paper`."""
        return State(
            0, self.H, dict.fromkeys(w.ranks, 0), x[w.ranks[0]], w.wire.start(x, w), w.wire.start(x, w)
        )

    def reduce(self, s: State, g: dict[int, Vec], w: World) -> tuple[State, dict[int, Vec]]:
        """See `Paper`."""
        if w.step > self.warmup:
            return s, g
        kept, g = w.wire.reduce(s.warmup, weighted(g, w.weight), evenly(w))
        return replace(s, warmup=kept), g

    def after(self, s: State, x: dict[int, Vec], w: World) -> tuple[State, dict[int, Vec]]:
        """See `Paper`."""
        if w.step <= self.warmup:
            return replace(s, y=x[w.ranks[0]]), x
        since, n = s.since + 1, {i: s.n.get(i, 0) + w.weight[i] for i in w.ranks}
        if since < s.H:
            of_hosts = w.hosts if self.H_host and since % self.H_host == 0 else ()
            means = {i: mean({j: x[j] for j in host}, w) for host in of_hosts for i in host}
            return replace(s, since=since, n=n), {**x, **means}
        changes = weighted({i: x[i] - s.y for i in w.ranks}, n)
        kept, change = w.wire.reduce(s.wire, changes, evenly(w))
        y = s.y + change[w.ranks[0]]
        H = min(math.ceil(s.H * self.growth), max(self.H_max, self.H))
        return replace(s, since=0, n=dict.fromkeys(w.ranks, 0), H=int(H), y=y, wire=kept), dict.fromkeys(
            w.ranks, y
        )
