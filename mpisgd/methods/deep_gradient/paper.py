"""Deep gradient compression: top-k of momentum that waits.

Lin, Han, Mao, Wang and Dally 2018, "Deep Gradient Compression", sections 3.1 to 3.3; Nesterov's form: its
appendix.

    g_i <- g_i min(1, c / (sqrt(N) |g_i|))     local clipping, by parameter as the authors' program; N ranks
    u_i <- m u_i + g_i                         momentum correction; m: the momentum
    v_i <- v_i + u_i                           with Nesterov v_i + g_i + m u_i
    s_i  = v_i where |v_i| is among the k largest of a parameter
    u_i, v_i <- 0 where something is sent      momentum factor masking
    g   <- mean of s_i

In the first T steps k / n falls exponentially, from r_0 to r (warm-up).
"""

import math
from dataclasses import dataclass

from mpisgd.methods.compression_kit import largest
from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, alike, filled, mean, own

__all__ = ["DeepGradient", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: velocities, what waits, and how many reductions there were."""

    u: Vecs = own(default_factory=dict, begin="zeros")
    v: Vecs = own(default_factory=dict, begin="zeros")
    k: int = alike(0)


@dataclass(frozen=True)
class DeepGradient(Paper[State]):
    """The momentum is here, and not in the wrapped optimizer."""

    keeps = State
    rounds, chooses = False, True

    r: float
    m: float = 0.9
    nesterov: bool = False
    T: int = 0
    r_0: float = 0.25
    c: float = math.inf

    def reduce(self, s: State, g: Vecs, w: World) -> tuple[State, Vecs]:
        ratio = max(self.r, self.r_0 * (self.r / self.r_0) ** (s.k / self.T)) if s.k < self.T else self.r
        limit = self.c / math.sqrt(len(w.ranks))
        us, vs, sent = {}, {}, {}
        for i, g_i in filled(g).items():
            g_i = g_i.each(lambda t: t * min(1.0, limit / float(t.norm())) if t.any() else t)
            u = (self.m * s.u[i] + g_i).only(g_i)
            v = (s.v[i] + (g_i + self.m * u if self.nesterov else u)).only(g_i)
            sent[i] = v.each(lambda t: largest(t, ratio))
            waits = sent[i].each(lambda t: (t == 0).to(t.dtype))
            us[i], vs[i] = Vec({**s.u[i], **u * waits}), Vec({**s.v[i], **v * waits})
        return State(us, vs, s.k + 1), dict.fromkeys(w.ranks, mean(sent, w))
