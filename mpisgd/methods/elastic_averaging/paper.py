"""EASGD: ranks step by themselves; an elastic force pulls them and a common centre together.

Zhang, Choromanska and LeCun 2015, "Deep learning with Elastic Averaging SGD", section 3, synchronous, with
the communication period tau of algorithm 1. z is the centre, beta = p alpha.

    x_i <- x_i - u(g_i)                       every step; u: the update of the optimizer
    d_i  = x_i - z                            every tau steps
    x_i <- x_i - alpha d_i
    z   <- z + beta (mean of d_i)

The paper takes the force at the x_i of the gradient, x_i - u(g_i) - alpha (x_i - z); here it is taken after
the update, as in Twitter's torch-distlearn. With error feedback the d_i cannot travel, since what was not
sent is in d_i again; what travels then is

    m   <- m + mean of C(x_i - last_i);   last_i <- x_i;   z <- z + beta (m - z)

where m and last_i begin as z, and do so again when a rank is lost, whose part of m nobody has; then what was
not sent begins anew, too.
"""

from dataclasses import dataclass, replace
from typing import Any

from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, alike, anew, own, part

__all__ = ["ElasticAveraging", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: the centre; with error feedback what has arrived of the mean, and x_i as it was then."""

    z: Vec = alike(default_factory=Vec, begin="copy")
    m: Vec = alike(default_factory=Vec)
    last: Vecs = own(default_factory=dict, lost="rebuild")
    wire: Any = part(lambda: None)


@dataclass(frozen=True)
class ElasticAveraging(Paper[State]):
    """Alpha is beta / p."""

    keeps = State
    consensus = "z"

    beta: float = 0.9
    tau: int = 1

    def after(self, s: State, x: Vecs, w: World) -> tuple[State, Vecs]:
        if w.step % self.tau:
            return s, x
        alpha, any_rank = self.beta / len(w.ranks), w.ranks[0]
        drawn = {i: x[i] - alpha * (x[i] - s.z) for i in w.ranks}
        if getattr(w.wire, "feedback", False):
            begun = s if s.last else State(wire=anew(s.wire, w.wire.start(x, w)))
            last = {i: Vec({**s.z, **begun.last.get(i, {})}) for i in w.ranks}
            kept, change = w.wire.reduce(begun.wire, {i: x[i] - last[i] for i in w.ranks}, w)
            m = Vec({**s.z, **begun.m}) + change[any_rank]
            return State(s.z + self.beta * (m - s.z), m, dict(x), kept), drawn
        kept, d = w.wire.reduce(s.wire, {i: x[i] - s.z for i in w.ranks}, w)
        return replace(s, z=s.z + self.beta * d[any_rank], wire=kept), drawn
