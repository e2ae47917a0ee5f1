"""Downpour SGD and stale synchronous parallel: ranks push gradients to servers, and fetch parameters.

Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1 and algorithm 7.1; the bound: Ho et al.
2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".

    step, of rank i      a_i <- a_i + share g_i;   x_i <- x_i - lr share g_i
    push, of rank i      x <- x - u(a_i);   a_i <- 0;   c_i <- c_i + 1      u: the servers' optimizer
    fetch, of rank i     x_i <- x           where |c_i - c_j| <= bound for all ranks j

Servers have parts of x, and know nothing of each other: a push and a fetch are of the parameters of one, and
so are the clocks c. In both papers `share` is 1; with 1 / p the pushes of all ranks go as far as one
synchronous step. The second bound of Ho, for ranks that are ahead, says what must not be in x yet.
"""

from dataclasses import dataclass, replace

from mpisgd.methods.paper_kit import Event, Paper, Vec, Vecs, World, alike, own

__all__ = ["ParameterServer", "State"]

Clocks = dict[str, int]  # by the names of parameters


@dataclass(frozen=True)
class State:
    """What is kept: the parameters of the servers, the clocks of the ranks, and what they have accrued."""

    x: Vec = alike(default_factory=Vec)
    c: dict[int, Clocks] = alike(default_factory=dict)
    a: Vecs = own(default_factory=dict)


@dataclass(frozen=True)
class ParameterServer(Paper[State]):
    """The servers have one optimizer, that of the first rank."""

    depends_on = ("hogwild",)

    share: float = 1.0
    lr: float = 0.0
    bound: float = float("inf")

    def start(self, x: Vecs, w: World) -> State:
        first = x[w.ranks[0]]
        return State(first, {i: dict.fromkeys(first, 0) for i in w.ranks}, {i: Vec() for i in w.ranks})

    def event(self, s: State, x: Vecs, e: Event, w: World) -> tuple[State, Vecs]:
        (i,), names = e.ranks, e.names or tuple(s.x)
        if e.what == "step":
            g = self.share * e.g
            return replace(s, a={**s.a, i: s.a[i] + g}), {**x, i: x[i] - self.lr * g}
        if e.what == "push":
            pushed = w.optimizer(w.ranks[0], s.x, s.a[i].only(names))
            waits = s.a[i].only([name for name in s.a[i] if name not in names])
            c_i = {name: count + (name in names) for name, count in s.c[i].items()}
            return State(pushed, {**s.c, i: c_i}, {**s.a, i: waits}), x
        for name in names:
            clocks = {j: s.c[j][name] for j in w.ranks}
            if any(abs(clocks[i] - clock) > self.bound for clock in clocks.values()):
                raise ValueError(f"rank {i} fetches {name}, of which the ranks have pushed {clocks}")
        return s, {**x, i: Vec({**x[i], **s.x.only(names)})}
