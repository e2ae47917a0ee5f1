"""0/1 Adam: a variance that is renewed ever more rarely, and steps between which the ranks do not meet.

Lu, Li, Zhang, De Sa and He 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam",
algorithm 1. Here, as in the authors' program, the mean gradient of a step in T_v serves the momentum, too;
the bias corrections in r and D are those of Adam, which the algorithm does not have.

    r_t = lr / (1 - b1^t);   D = sqrt(v / (1 - b2^j)) + eps      j: how often v was renewed
    t in T_v:   g = mean of g_i;   m_i <- b1 mean of m_j + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
                x_i <- x_i - r_t m_i / D;   y <- x_i
    else:       m_i <- b1 m_i + (1 - b1) g_i;   u_i <- u_i + r_t m_i;   x_i <- x_i - r_t m_i / D
    t in T_u:   u = average of u_i               by `w.wire`: the 1-bit average with two errors
                x_i <- y <- y - u / D;   m_i <- u / (sum of r since then);   u_i <- 0

lr is a function of t. Where the sum of r is 0, u tells nothing of the momentum, and m_i stays. Where v is 0
so are m_i and u: there was no gradient, and what comes is noise of the compression.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

from mpisgd.methods.paper_kit import Paper, Vec, World, alike, filled, mean, nonzero, own, part

__all__ = ["State", "ZeroOneAdam"]


@dataclass(frozen=True)
class State:
    """What is kept: y are the parameters at the last meeting, r the sum of rates since then."""

    y: Vec = alike(default_factory=Vec)
    m: dict[int, Vec] = own(default_factory=dict)
    u: dict[int, Vec] = own(default_factory=dict)
    v: Vec = alike(default_factory=Vec)
    j: int = alike(0)
    r: float = alike(0.0)
    wire: Any = part(lambda: None)


@dataclass(frozen=True)
class ZeroOneAdam(Paper[State]):
    """Updates by itself."""

    depends_on = ("two_step",)

    T_v: Container[int]
    T_u: Container[int]
    lr: Callable[[int], float]
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def start(self, x: dict[int, Vec], w: World) -> State:
        """See `Paper`."""
        zero = {i: Vec() for i in w.ranks}
        return State(x[w.ranks[0]], zero, zero, wire=w.wire.start(x, w))

    def update(
        self, s: State, x: dict[int, Vec], g: dict[int, Vec], w: World
    ) -> tuple[State, dict[int, Vec]]:
        """See `Paper`."""
        g, t, rate = filled(g), w.step, self.lr(w.step) / (1 - self.b1**w.step)
        renews = t in self.T_v
        if renews:
            g_mean = mean(g, w)
            g = dict.fromkeys(w.ranks, g_mean)
            s = replace(s, m=dict.fromkeys(w.ranks, mean(s.m, w)))
            s = replace(s, v=self.b2 * s.v + (1 - self.b2) * (g_mean * g_mean), j=s.j + 1)
        m = {i: (self.b1 * s.m[i] + (1 - self.b1) * g[i]) * nonzero(s.v) for i in w.ranks}
        D = (s.v / (1 - self.b2**s.j)).each(lambda v: v.sqrt() + self.eps)
        x = {i: x[i] - rate * m[i] / D for i in w.ranks}
        if renews:
            return replace(s, m=m, y=x[w.ranks[0]]), x
        u, r = {i: s.u[i] + rate * m[i] for i in w.ranks}, s.r + rate
        if t not in self.T_u:
            return replace(s, m=m, u=u, r=r), x
        wire, averaged = w.wire.reduce(s.wire, u, w)
        joined = averaged[w.ranks[0]] * nonzero(s.v)
        y, zero = s.y - joined / D, {i: Vec() for i in w.ranks}
        m = dict.fromkeys(w.ranks, joined / r) if r else m
        return State(y, m, zero, s.v, s.j, 0.0, wire), dict.fromkeys(w.ranks, y)
