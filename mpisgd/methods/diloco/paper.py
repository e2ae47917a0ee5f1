"""DiLoCo: ranks step by themselves for H steps, and an outer optimizer takes the mean of their changes.

Douillard et al. 2023, "DiLoCo", algorithm 1; in fragments, and overlapped: Douillard et al. 2025, "Streaming
DiLoCo with overlapping communication", algorithms 1 and 2; without Nesterov's momentum it is SlowMo.

    x_i <- x_i - u(g_i)                        every step; u: the update of the inner optimizer
    D    = mean of c_i (theta - x_i)           every H steps: the outer gradient
    v   <- mu v + D;   theta <- theta - lr (D + mu v)             or theta - lr v, without Nesterov
    x_i <- alpha x_i + (1 - alpha) theta       tau steps after D was taken; alpha is 0 if tau is 0

n_i: examples of rank i of p since the last D; c_i = p n_i / (n_1 + ... + n_p). Where several ranks are one
learner, g_i is the mean of their gradients, and i counts learners in D.

Fragment f of F is due f H / F steps later than the first one. Each travels by itself; parameters that are
added later are another one, which is due with the first.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, alike, filled, mean, own, part, sent

__all__ = ["DiLoCo", "State"]


@dataclass(frozen=True)
class State:
    """What is kept, by the symbols above.

    Attributes:
        D: of what was not applied yet.
        n: by parameter.
        fragments: the names of each.
        wire: by fragment; (): as it begins.
    """

    theta: Vec = alike(default_factory=Vec, begin="copy")
    v: Vec = alike(default_factory=Vec)
    D: Vec = alike(default_factory=Vec)
    n: dict[int, dict[str, float]] = own(default_factory=dict)
    fragments: tuple[tuple[str, ...], ...] = alike(())
    wire: dict[tuple[str, ...], Any] = part(dict)


@dataclass(frozen=True)
class DiLoCo(Paper[State]):
    """Fragments are the names of their parameters; by default there is one, of all.

    Attributes:
        ranks: of a host, how many are one learner; 0: all of them.
    """

    keeps = State
    consensus = "theta"
    depends_on = ("slow_mo",)
    weighs = True

    H: int
    lr: float = 0.7
    mu: float = 0.9
    nesterov: bool = True
    fragments: tuple[tuple[str, ...], ...] = ()
    tau: int = 0
    alpha: float = 0.0
    ranks: int = 1

    def _learners(self, w: World) -> list[tuple[int, ...]]:
        cut = [(host, self.ranks or len(host)) for host in w.hosts]
        return [host[k : k + count] for host, count in cut for k in range(0, len(host), count)]

    def start(self, x: Vecs, w: World) -> State:
        s = super().start(x, w)
        return replace(s, wire={(): s.wire})

    def reduce(self, s: State, g: Vecs, w: World) -> tuple[State, Vecs]:
        if self.ranks == 1:
            return s, g
        means = {ranks: mean(filled({i: g[i] for i in ranks}), w) for ranks in self._learners(w)}
        return s, {i: means[ranks] for ranks in means for i in ranks}

    def after(self, s: State, x: Vecs, w: World) -> tuple[State, Vecs]:
        s = replace(s, n={i: {f: s.n.get(i, {}).get(f, 0) + w.weight[i] for f in s.theta} for i in w.ranks})
        if added := tuple(s.theta.without([*chain(*s.fragments)])):
            s = replace(s, fragments=(*s.fragments, added) if s.fragments else self.fragments or (added,))
        F = max(1, len(self.fragments))
        first = tuple(ranks[0] for ranks in self._learners(w)) if self.ranks != 1 else w.ranks
        between = w if self.ranks == 1 else w._replace(ranks=first, hosts=tuple((i,) for i in first))
        for f, names in enumerate(s.fragments):
            since = w.step - (f * self.H // F if f < F else 0)
            if self.tau and since % self.H == self.tau and s.D.only(names):
                s, x = self._outer_step(s, x, names)
            if since >= 0 and since % self.H == 0:
                changes = {i: s.theta.only(names) - x[i].only(names) for i in first}
                kept, counts = s.wire.get(names, s.wire[()]), {i: s.n[i][names[0]] for i in first}
                kept, D = sent(kept, changes, between.only(names), counts)
                n = {i: s.n[i] | dict.fromkeys(names, 0) for i in w.ranks}
                s = replace(s, D=s.D | D, n=n, wire=s.wire | {names: kept})
                s, x = (s, x) if self.tau else self._outer_step(s, x, names)
        return s, x

    def _outer_step(self, s: State, x: Vecs, names: tuple[str, ...]) -> tuple[State, Vecs]:
        alpha, D = self.alpha if self.tau else 0.0, s.D.only(names)
        v = self.mu * s.v.only(names) + D
        theta = s.theta.only(names) - self.lr * (D + self.mu * v if self.nesterov else v)
        x = {i: x_i | (alpha * x_i.only(names) + (1 - alpha) * theta) for i, x_i in x.items()}
        return replace(s, theta=s.theta | theta, v=s.v | v, D=s.D.without(names)), x
