"""AD-PSGD: pairs of ranks average while the ranks compute, and nobody waits.

Lian, Zhang, Zhang and Liu 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
algorithm 1. u: the update of the optimizer.

    step, of rank i          x_i <- x_i - u(g_i)            g_i at z_i, a copy of x_i from before
                             z_i <- x_i
    average, of i and j      x_i, x_j <- (x_i + x_j) / 2

An average does not change the sum of all x_i, whenever it comes. The model has z_i.
"""

from dataclasses import dataclass

from mpisgd.methods.paper_kit import Event, Paper, Vec, World, mean, own

__all__ = ["ADPSGD", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: the models that are averaged."""

    x: dict[int, Vec] = own(default_factory=dict)


@dataclass(frozen=True)
class ADPSGD(Paper[State]):
    """All happens in events."""

    def start(self, x: dict[int, Vec], w: World) -> State:
        """See `Paper`."""
        return State(dict(x))

    def event(self, s: State, x: dict[int, Vec], e: Event, w: World) -> tuple[State, dict[int, Vec]]:
        """See `Paper`."""
        if e.what == "average":
            both = mean({i: s.x[i] for i in e.ranks}, w)
            return State({**s.x, **dict.fromkeys(e.ranks, both)}), x
        (i,) = e.ranks
        x_i = s.x[i] + (w.optimizer(i, x[i], e.g) - x[i])
        return State({**s.x, i: x_i}), {**x, i: x_i}
