"""AD-PSGD: pairs of ranks average while the ranks compute, and nobody waits.

Lian, Zhang, Zhang and Liu 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent",
algorithm 1. u: the update of the optimizer; z_i, a copy of x_i, is what the model has.

    step, of rank i        x_i <- x_i - u(g_i);   z_i <- x_i           g_i at z_i
    average, of i and j    x_i, x_j <- (x_i + x_j) / 2                 in three parts:

    ask, of i to j         s <- x_i
    answer, of j to i      a <- x_j;   x_j <- x_j + (s - a) / 2
    take, of i from j      x_i <- x_i + (a - s) / 2

A rank that asks answers nobody meanwhile, but steps: so its step may come between the ask and the take, as if
it were after the average. In the paper the average is atomic. The sum of all x_i is not changed by it.
"""

from dataclasses import dataclass, replace

from mpisgd.methods.paper_kit import Event, Paper, Vecs, World, own

__all__ = ["ADPSGD", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: the models that are averaged, and what travels, by who has asked."""

    x: Vecs = own(default_factory=dict)
    s: Vecs = own(default_factory=dict)
    a: Vecs = own(default_factory=dict)


@dataclass(frozen=True)
class ADPSGD(Paper[State]):
    """All happens in events; those of two ranks name the one that asks first."""

    def start(self, x: Vecs, w: World) -> State:
        return State(dict(x))

    def event(self, s: State, x: Vecs, e: Event, w: World) -> tuple[State, Vecs]:
        i, *others = e.ranks
        match e.what:
            case "step":
                x_i = s.x[i] + (w.optimizer(i, x[i], e.g) - x[i])
                return replace(s, x={**s.x, i: x_i}), {**x, i: x_i}
            case "ask":
                return replace(s, s={**s.s, i: s.x[i]}), x
            case "answer":
                (j,) = others
                a = s.x[j]
                return State({**s.x, j: a + 0.5 * (s.s[i] - a)}, s.s, {**s.a, i: a}), x
            case _:
                return replace(s, x={**s.x, i: s.x[i] + 0.5 * (s.a[i] - s.s[i])}), x
