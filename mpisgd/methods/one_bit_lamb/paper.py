"""1-bit LAMB: LAMB for T steps, then its momentum by one bit per element, and factors for trust ratios.

Li, Awan, Tang, Rajbhandari and He 2021, "1-bit LAMB", algorithm 1; LAMB: You et al. 2020. For each parameter
x by itself, with s(v) = sqrt(v) + eps and d = m / s(v), u = d + decay x:

    t <= T:   g = mean of g_i;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2;   f = v;   r = 1
              c = |x| / |u|, within c_limits; 1 where one of them is 0;   k = c
              a <- b3 a + (1 - b3) c, at first c
    t > T:    n = average of b1 m + (1 - b1) g_i       by `w.wire`: the 1-bit average with two errors
              f <- b2 f + (1 - b2) ((n - b1 m) / (1 - b1))^2;   m <- n
              r <- h (max of s(v) / s(f)) + 1 - h, within r_limits, and 1 - q and 1 + q times r;   k = r a
    always:   x <- x - lr k u

lr is a function of t. The paper has no h = |d| / |u|, at most 1: without decay it is 1.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpisgd.methods.compression_kit import CompressedMomentum, Moments, root
from mpisgd.methods.paper_kit import Vec, Vecs, World, alike, everyone

__all__ = ["OneBitLamb", "State"]


@dataclass(frozen=True)
class State(Moments):
    """What is kept, by the symbols above."""

    f: Vec = alike(default_factory=Vec)
    a: Vec = alike(default_factory=Vec)
    r: Vec = alike(default_factory=Vec)


@dataclass(frozen=True)
class OneBitLamb(CompressedMomentum[State]):
    """See above."""

    keeps = State

    b3: float = 0.9
    q: float = 0.1
    c_limits: tuple[float, float] = (0.01, 10.0)
    r_limits: tuple[float, float] = (0.5, 4.0)

    def update(self, s: State, x: Vecs, g: Vecs, w: World) -> tuple[State, Vecs]:
        y, m, s = x[w.ranks[0]], s.m, self.moments(s, g, w)
        d = s.m / root(s.v, self.eps)
        u = d + self.decay * y.only(s.m)
        if w.step <= self.T:
            k = Vec({name: self._c(y[name], u[name]) for name in u})
            a = self.b3 * s.a + (1 - self.b3) * k if s.a else k
            s = replace(s, f=s.v, a=a, r=k.each(torch.ones_like))
        else:
            g_new = (s.m - self.b1 * m) / (1 - self.b1)
            s = replace(s, f=self.b2 * s.f + (1 - self.b2) * (g_new * g_new))
            most = (root(s.v, self.eps) / root(s.f, self.eps)).each(torch.max)
            s = replace(s, r=Vec({name: self._r(s.r[name], most[name], d[name], u[name]) for name in u}))
            k = s.r * s.a
        return s, everyone(y - self.lr(w.step) * (k * u), w)

    def _c(self, x: Tensor, u: Tensor) -> Tensor:
        c = (x.norm() / u.norm()).clamp(*self.c_limits)
        return c if x.any() and u.any() else torch.ones_like(c)

    def _r(self, last: Tensor, most: Tensor, d: Tensor, u: Tensor) -> Tensor:
        h: Tensor = (d.norm() / u.norm()).nan_to_num(1.0).clamp(max=1.0)
        r = (h * most + 1 - h).clamp(*self.r_limits)
        return r.clamp(last * (1 - self.q), last * (1 + self.q))
