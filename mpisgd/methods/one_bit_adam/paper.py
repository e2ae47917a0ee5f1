"""1-bit Adam: Adam for T steps, then its momentum by one bit per element, with the variance as it was.

Tang et al. 2021, "1-bit Adam", algorithm 1. The bias corrections are those of Adam (Kingma and Ba 2015),
which the algorithm leaves out; that of v stays what it was at step T.

    t <= T:   g = mean of g_i;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
    t > T:    m <- average of b1 m + (1 - b1) g_i           by `w.wire`: the 1-bit average with two errors
              x <- (1 - lr decay) x - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^min(t, T))) + eps)

lr is a function of t; decay is AdamW's (Loshchilov and Hutter 2019). Where v is 0 m is 0 after T: there was
no gradient, and what comes is noise of the compression.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mpisgd.methods.paper_kit import Paper, Vec, World, alike, filled, mean, nonzero, part

__all__ = ["OneBitAdam", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: the momentum and the variance, which all ranks have, and the errors of the average."""

    m: Vec = alike(default_factory=Vec)
    v: Vec = alike(default_factory=Vec)
    wire: Any = part(lambda: None)


@dataclass(frozen=True)
class OneBitAdam(Paper[State]):
    """Updates by itself. The gradients that the ranks have stay their own until then."""

    depends_on = ("two_step",)

    T: int
    lr: Callable[[int], float]
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0

    def start(self, x: dict[int, Vec], w: World) -> State:
        """See `Paper`."""
        return State(wire=w.wire.start(x, w))

    def update(
        self, s: State, x: dict[int, Vec], g: dict[int, Vec], w: World
    ) -> tuple[State, dict[int, Vec]]:
        """See `Paper`."""
        g, t = filled(g), w.step
        if t <= self.T:
            g_mean = mean(g, w)
            m = self.b1 * s.m + (1 - self.b1) * g_mean
            s = replace(s, m=m, v=self.b2 * s.v + (1 - self.b2) * (g_mean * g_mean))
        else:
            local = {i: self.b1 * s.m + (1 - self.b1) * g[i] for i in w.ranks}
            wire, averaged = w.wire.reduce(s.wire, local, w)
            m = averaged[w.ranks[0]] * nonzero(s.v)
            s = replace(s, m=m, wire=wire)
        corrected = s.v / (1 - self.b2 ** min(t, self.T))
        step = s.m / corrected.each(lambda v: v.sqrt() + self.eps) * (self.lr(t) / (1 - self.b1**t))
        return s, {i: (1 - self.lr(t) * self.decay) * x[i] - step for i in w.ranks}
