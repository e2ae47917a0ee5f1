"""Downpour SGD and stale synchronous parallel: ranks push gradients to servers, and fetch parameters.

Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1; the bound: Ho et al. 2013, "More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".

    push, of rank i      x <- x - u(share g_i);   c_i <- c_i + 1     u: the update of the servers' optimizer
    fetch, of rank i     x_i <- x
    step, of rank i      x_i <- x_i - lr g_i        between fetches, where these are rarer than steps

In both papers `share` is 1; with 1 / p the pushes of all ranks go as far as one synchronous step. A rank
begins a step only where c_i - min c_j <= bound.

Without locks (Recht et al. 2011, "Hogwild!") updates of the same elements may be lost, and there is nothing
to replay: each update counts once where no two ranks ever update the same ones.
"""

from dataclasses import dataclass, replace

from mpisgd.methods.paper_kit import Event, Paper, Vec, World, alike

__all__ = ["ParameterServer", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: the parameters of the servers, and the clocks of the ranks."""

    x: Vec = alike(default_factory=Vec)
    c: dict[int, int] = alike(default_factory=dict)


@dataclass(frozen=True)
class ParameterServer(Paper[State]):
    """The servers have one optimizer, that of the first rank."""

    share: float = 1.0
    lr: float = 0.0
    bound: int | None = None

    def start(self, x: dict[int, Vec], w: World) -> State:
        """See `Paper`."""
        return State(x[w.ranks[0]], dict.fromkeys(w.ranks, 0))

    def event(self, s: State, x: dict[int, Vec], e: Event, w: World) -> tuple[State, dict[int, Vec]]:
        """See `Paper`."""
        (i,) = e.ranks
        if e.what == "fetch":
            return s, {**x, i: s.x}
        if e.what == "step":
            return s, {**x, i: x[i] - self.lr * e.g}
        c = {**s.c, i: s.c[i] + 1}
        if self.bound is not None and c[i] - min(c.values()) > self.bound + 1:
            raise ValueError(f"rank {i} has pushed {c[i]} times, another one {min(c.values())}")
        return replace(s, x=w.optimizer(w.ranks[0], s.x, self.share * e.g), c=c), x
