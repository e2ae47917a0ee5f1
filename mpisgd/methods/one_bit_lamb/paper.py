"""1-bit LAMB: LAMB for T steps, then its momentum by one bit per element, and factors for trust ratios.

Li, Awan, Tang, Rajbhandari and He 2021, "1-bit LAMB", algorithm 1; LAMB: You et al. 2020. For each parameter
x by itself, with s(v) = sqrt(v) + eps:

    t <= T:   g = mean of g_i;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2;   f = v
              u = m / s(v) + decay x;   k = |x| / |u|, within c_limits; 1 where one of them is 0
              a <- b3 a + (1 - b3) k, at first k
    t > T:    n = average of b1 m + (1 - b1) g_i       by `w.wire`: the 1-bit average with two errors
              f <- b2 f + (1 - b2) ((n - b1 m) / (1 - b1))^2;   m <- n;   u = m / s(v) + decay x
              h = |m / s(v)| / |u|, at most 1;   r <- h (max of s(v) / s(f)) + 1 - h, within r_limits,
                  and within 1 - q and 1 + q times the last r, at first 1;   k = r a
    always:   x <- x - lr k u

lr is a function of t. The paper has no h, the share of the momentum in the update; without decay it is 1.
Where v is 0 so is n: there was no gradient, and what comes is noise of the compression.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpisgd.methods.paper_kit import CompressedMomentum, Moments, Vec, World, alike

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

    b3: float = 0.9
    q: float = 0.1
    c_limits: tuple[float, float] = (0.01, 10.0)
    r_limits: tuple[float, float] = (0.5, 4.0)

    def start(self, x: dict[int, Vec], w: World) -> State:
        """See `Paper`."""
        return State(wire=w.wire.start(x, w))

    def update(
        self, s: State, x: dict[int, Vec], g: dict[int, Vec], w: World
    ) -> tuple[State, dict[int, Vec]]:
        """See `Paper`."""
        y, m, s = x[w.ranks[0]], s.m, self.moments(s, g, w)
        step = s.m / s.v.each(self._s)
        u = step + self.decay * y.only(s.m)
        if w.step <= self.T:
            k = Vec({name: ratio(y[name], u[name]).clamp(*self.c_limits) for name in u})
            s = replace(s, f=s.v, a=self.b3 * s.a + (1 - self.b3) * k if s.a else k)
        else:
            fresh = (s.m - self.b1 * m) / (1 - self.b1)
            s = replace(s, f=self.b2 * s.f + (1 - self.b2) * (fresh * fresh))
            s = replace(s, r=Vec({name: self._r(s, name, ratio(step[name], u[name])) for name in u}))
            k = s.r * s.a
        return s, dict.fromkeys(w.ranks, y - self.lr(w.step) * (k * u))

    def _s(self, v: Tensor) -> Tensor:
        return v.sqrt() + self.eps

    def _r(self, s: State, name: str, h: Tensor) -> Tensor:
        most, h = (self._s(s.v[name]) / self._s(s.f[name])).max(), h.clamp(max=1.0)
        last = s.r.get(name, torch.ones_like(most))
        r = (h * most + 1 - h).clamp(*self.r_limits)
        return r.clamp(last * (1 - self.q), last * (1 + self.q))


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return |a| / |b|; 1 where one of them is 0."""
    return a.norm() / b.norm() if a.any() and b.any() else torch.ones_like(a.norm())
