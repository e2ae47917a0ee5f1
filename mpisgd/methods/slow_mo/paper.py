"""SlowMo: ranks step by themselves for tau steps, and a slow momentum takes the mean of their changes.

Wang, Tantia, Ballas and Rabbat 2020, "SlowMo", algorithm 1. y: where the ranks began; gamma: the learning
rate of the base optimizer, whose buffers are kept.

    x_i <- x_i - v_i                               every step; v_i: the update of the base optimizer
    u   <- beta u + (y - mean of x_i) / gamma      every tau steps
    x_i <- y <- y - alpha gamma u

With a gamma that does not change it is DiLoCo whose outer optimizer is SGD: gamma u is its velocity.
"""

from dataclasses import dataclass
from typing import Any

from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, alike, part

__all__ = ["SlowMo", "State"]


@dataclass(frozen=True)
class State:
    """What is kept."""

    y: Vec = alike(default_factory=Vec, begin="copy")
    u: Vec = alike(default_factory=Vec)
    wire: Any = part(lambda: None)


@dataclass(frozen=True)
class SlowMo(Paper[State]):
    """The slow momentum and the slow learning rate."""

    keeps = State

    tau: int
    gamma: float
    beta: float
    alpha: float = 1.0

    def after(self, s: State, x: Vecs, w: World) -> tuple[State, Vecs]:
        if w.step % self.tau:
            return s, x
        wire, change = w.wire.reduce(s.wire, {i: s.y - x[i] for i in w.ranks}, w)
        u = self.beta * s.u + change[w.ranks[0]] / self.gamma
        y = s.y - self.alpha * self.gamma * u
        return State(y, u, wire), dict.fromkeys(w.ranks, y)
