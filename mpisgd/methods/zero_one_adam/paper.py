"""0/1 Adam: a variance that is renewed ever more rarely, and steps between which the ranks do not meet.

Lu, Li, Zhang, De Sa and He 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam",
algorithm 1. Here, as in the authors' program, the mean gradient of a step in T_v serves the momentum, too;
the bias corrections in r_t and D are those of Adam, which the algorithm does not have.

    r_t = lr / (1 - b1^t);   D = sqrt(v / (1 - b2^j)) + eps      j: how often v was renewed
    t in T_v:   g = mean of g_i;   m_i <- b1 mean of m_j + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
                x_i <- x_i - r_t m_i / D;   y <- x_i
    else:       m_i <- b1 m_i + (1 - b1) g_i;   u_i <- u_i + r_t m_i;   x_i <- x_i - r_t m_i / D
    t in T_u:   u = average of u_i               by `w.wire`: the 1-bit average with two errors
                x_i <- y <- y - u / D;   m_i <- u / r;   u_i <- 0     r: the sum of r_t since then, if not 0

lr is a function of t. Where v is 0 so are m_i and u: there was no gradient, and what comes is noise.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

from mpisgd.methods.compression_kit import root
from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, alike, everyone, filled, mean, own, part, sent

__all__ = ["State", "ZeroOneAdam"]


@dataclass(frozen=True)
class State:
    """What is kept, by the symbols above; y are the parameters at the last meeting."""

    y: Vec = alike(default_factory=Vec, begin="copy")
    m: Vecs = own(default_factory=dict, begin="zeros")
    u: Vecs = own(default_factory=dict, begin="zeros")
    v: Vec = alike(default_factory=Vec)
    j: int = alike(0)
    r: float = alike(0.0)
    wire: Any = part(lambda: None)


@dataclass(frozen=True)
class ZeroOneAdam(Paper[State]):
    """Updates by itself."""

    keeps = State
    depends_on = ("two_step",)

    T_v: Container[int]
    T_u: Container[int]
    lr: Callable[[int], float]
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def update(self, s: State, x: Vecs, g: Vecs, w: World) -> tuple[State, Vecs]:
        g, r_t, b1, b2 = filled(g), self.lr(w.step) / (1 - self.b1**w.step), self.b1, self.b2
        if w.step in self.T_v:
            g_mean, m_mean = mean(g, w), mean(s.m, w)
            g, v = everyone(g_mean, w), b2 * s.v + (1 - b2) * (g_mean * g_mean)
            s = replace(s, m=everyone(m_mean, w), v=v, j=s.j + 1)
        m = {i: (b1 * s.m[i] + (1 - b1) * g[i]) * s.v.nonzero() for i in w.ranks}
        D = root(s.v / (1 - b2**s.j), self.eps)
        x = {i: x[i] - r_t * m[i] / D for i in w.ranks}
        if w.step in self.T_v:
            return replace(s, m=m, y=x[w.ranks[0]]), x
        s = replace(s, m=m, u={i: s.u[i] + r_t * m[i] for i in w.ranks}, r=s.r + r_t)
        if w.step not in self.T_u:
            return s, x
        wire, u = sent(s.wire, s.u, w)
        u = u * s.v.nonzero()
        y, m = s.y - u / D, everyone(u / s.r, w) if s.r else m
        return State(y, m, everyone(Vec(), w), s.v, s.j, 0.0, wire), everyone(y, w)
