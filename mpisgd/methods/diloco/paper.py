"""DiLoCo: ranks step by themselves for H steps, and an outer optimizer takes the mean of their changes.

Douillard et al. 2023, "DiLoCo", algorithm 1; in fragments, and overlapped: Douillard et al. 2025, "Streaming
DiLoCo with overlapping communication", algorithms 1 and 2; without Nesterov's momentum it is SlowMo.

    x_i <- x_i - u(g_i)                        every step; u: the update of the inner optimizer
    D    = mean of (theta - x_i)               every H steps: the outer gradient
    v   <- mu v + D;   theta <- theta - lr (D + mu v)             or theta - lr v, without Nesterov
    x_i <- alpha x_i + (1 - alpha) theta       tau steps after D was taken; alpha is 0 if tau is 0

Where ranks have unequal numbers n_i of examples since the last D, it is the mean of c_i (theta - x_i), c_i =
p n_i / (n_1 + ... + n_p).

Fragment f of F is due f H / F steps later than the first one.
"""

from dataclasses import dataclass, replace
from typing import Any

from mpisgd.methods.paper_kit import Paper, Vec, World, alike, evenly, own, part, weighted

__all__ = ["DiLoCo", "State"]


@dataclass(frozen=True)
class State:
    """What is kept."""

    theta: Vec = alike(default_factory=Vec)
    v: Vec = alike(default_factory=Vec)
    D: Vec = alike(default_factory=Vec)  # taken, and not applied yet
    n: dict[int, dict[str, float]] = own(default_factory=dict)  # examples since the last D, by parameter
    wire: Any = part(lambda: None)


@dataclass(frozen=True)
class DiLoCo(Paper[State]):
    """Fragments are the names of their parameters; by default there is one, of all."""

    depends_on = ("slow_mo",)
    weighs = True

    H: int
    lr: float = 0.7
    mu: float = 0.9
    nesterov: bool = True
    fragments: tuple[tuple[str, ...], ...] = ()
    tau: int = 0
    alpha: float = 0.0

    def start(self, x: dict[int, Vec], w: World) -> State:
        """See `Paper`."""
        return State(theta=x[w.ranks[0]], wire=w.wire.start(x, w))

    def after(self, s: State, x: dict[int, Vec], w: World) -> tuple[State, dict[int, Vec]]:
        """See `Paper`."""
        fragments = self.fragments or (tuple(s.theta),)
        n = {i: {f: s.n.get(i, {}).get(f, 0) + w.weight[i] for f in s.theta} for i in w.ranks}
        s = replace(s, n=n)
        for f, names in enumerate(fragments):
            since = w.step - f * self.H // len(fragments)
            if self.tau and s.D.only(names) and since % self.H == self.tau:
                s, x = self._outer_step(s, x, names, self.alpha)
            if since >= 0 and since % self.H == 0:
                theta = s.theta.only(names)
                changes = {i: theta - x[i].only(names) for i in w.ranks}
                changes = weighted(changes, {i: s.n[i][names[0]] for i in w.ranks})
                kept, D = w.wire.reduce(s.wire, changes, evenly(w))
                n = {i: {**s.n[i], **dict.fromkeys(names, 0)} for i in w.ranks}
                s = replace(s, D=Vec({**s.D, **D[w.ranks[0]]}), n=n, wire=kept)
                if not self.tau:
                    s, x = self._outer_step(s, x, names, 0.0)
        return s, x

    def _outer_step(
        self, s: State, x: dict[int, Vec], names: tuple[str, ...], alpha: float
    ) -> tuple[State, dict[int, Vec]]:
        D = s.D.only(names)
        v = self.mu * s.v.only(names) + D
        theta = s.theta.only(names) - self.lr * (D + self.mu * v if self.nesterov else v)
        x = {i: Vec({**x_i, **(alpha * x_i.only(names) + (1 - alpha) * theta)}) for i, x_i in x.items()}
        waits = Vec({name: change for name, change in s.D.items() if name not in names})
        return replace(s, theta=Vec({**s.theta, **theta}), v=Vec({**s.v, **v}), D=waits), x
