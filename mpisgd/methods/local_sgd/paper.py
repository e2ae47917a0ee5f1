"""Local SGD: ranks step by themselves, and every H steps their parameters become the mean.

Stich 2019, "Local SGD Converges Fast and Communicates Little", algorithm 1; with warm-up, and on hosts: Lin
et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD"; growing H: Haddadpour et al. 2019; compressed:
Basu et al. 2019, "Qsparse-local-SGD", algorithm 1; with n_i: McMahan et al. 2017, algorithm 1; with a mean of
what optimizers keep: Yu, Jin and Yang 2019, algorithm 1.

    x_i <- x_i - u(g_i)                      u: of the optimizer; takes the mean gradient for `warmup` steps
    x_i <- y <- y + mean of c_i (x_i - y)    after every H-th step; y: the last mean; the x of a lone rank
    x_i <- mean of x_j of a host             after every `H_host`-th of the others

n_i: examples of rank i of p since the last mean; c_i = p n_i / (n_1 + ... + n_p).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, alike, everyone, host_means, own, part, sent

__all__ = ["LocalSGD", "State"]


@dataclass(frozen=True)
class State:
    """What is kept, by the symbols above; `warmup`: what the compressor keeps of gradients."""

    since: int = alike(0)  # steps since the last mean
    H: int = alike(0)  # of the next one; 0: as it begins
    n: dict[int, float] = own(default_factory=dict)
    y: Vec = alike(default_factory=Vec, begin="copy")
    wire: Any = part(lambda: None)
    warmup: Any = part(lambda: None)


@dataclass(frozen=True)
class LocalSGD(Paper[State]):
    """H is multiplied by `growth` after each mean, up to `H_max`."""

    keeps = State
    weighs = True

    H: int
    H_host: int = 0
    warmup: int = 0
    growth: float = 1.0
    H_max: float = math.inf
    averages_state: bool = False

    def reduce(self, s: State, g: Vecs, w: World) -> tuple[State, Vecs]:
        if w.step > self.warmup:
            return s, g
        kept, g_mean = sent(s.warmup, g, w, w.weight)
        return replace(s, warmup=kept), everyone(g_mean, w)

    def after(self, s: State, x: Vecs, w: World) -> tuple[State, Vecs]:
        if w.step <= self.warmup or len(w.ranks) == 1:
            s = replace(s, y=x[w.ranks[0]])
        if w.step <= self.warmup:
            return s, x
        s = replace(s, since=s.since + 1, n={i: s.n.get(i, 0) + w.weight[i] for i in w.ranks})
        if s.since < (H := s.H or self.H):
            if not self.H_host or s.since % self.H_host:
                return s, x
            for host in w.hosts if self.averages_state else ():
                w.average_state(dict.fromkeys(host, 1))
            return s, host_means(x, w)
        if self.averages_state:
            w.average_state(s.n)
        wire, change = sent(s.wire, {i: x[i] - s.y for i in w.ranks}, w, s.n)
        y, H_next = s.y + change, min(math.ceil(H * self.growth), max(self.H_max, self.H))
        return State(H=int(H_next), y=y, wire=wire, warmup=s.warmup), everyone(y, w)
