"""PowerSGD: a matrix of gradients is sent as the product of two narrow ones, by one power iteration a step.

Vogels, Karimireddy and Jaggi 2019, "PowerSGD", algorithms 1 and 2; a parameter is a matrix [n, m], of its
first dimension and all others. r: the rank; p ranks.

    M_i = G_i + E_i                           error feedback
    P   = mean of M_i Q                       [n, r]; Q: of the step before, at first normal numbers
    P   = orthonormal basis of P              by Gram and Schmidt
    Q   = mean of M_i^T P                     [m, r]
    G   = P Q^T;   E_i = M_i - G

Vectors are sent as they are, and so are all gradients in the first T steps, and matrices for which r (n + m)
times `least` is not less than n m. The paper has no T, and feedback always.
"""

from dataclasses import dataclass

from torch import Tensor

from mpisgd.methods.compression_kit import orthonormal
from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, alike, everyone, filled, mean, own

__all__ = ["PowerSGD", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: residuals, factors, and how many reductions there were."""

    e: Vecs = own(default_factory=dict)
    Q: Vec = alike(default_factory=Vec)
    k: int = alike(0)


@dataclass(frozen=True)
class PowerSGD(Paper[State]):
    """See above."""

    of_memory = True

    r: int
    T: int = 0
    feedback: bool = True
    least: float = 1.0

    def start(self, x: Vecs, w: World) -> State:
        first, tensors = w.draw(0, None), x[w.ranks[0]].items()
        Q = {name: first.normal(name, t.flatten(1), r) for name, t in tensors if (r := self._rank(t))}
        return State(everyone(Vec(), w), Vec(Q))

    def reduce(self, s: State, g: Vecs, w: World) -> tuple[State, Vecs]:
        g = filled(g)
        G, Q, e = mean(g, w), Vec(s.Q), dict(s.e)
        for name in G.only(s.Q) if s.k >= self.T else ():
            M = {i: (g[i] + e[i])[name].flatten(1) for i in w.ranks}
            P = orthonormal(w.sum({i: M[i] @ Q[name] for i in w.ranks}) / len(w.ranks))
            Q[name] = w.sum({i: M[i].T @ P for i in w.ranks}) / len(w.ranks)
            G[name] = (P @ Q[name].T).view(G[name].shape)
            for i in w.ranks if self.feedback else ():
                e[i] = e[i] | Vec({name: M[i].view(G[name].shape) - G[name]})
        return State(e, Q, s.k + 1), everyone(G, w)

    def _rank(self, t: Tensor) -> int:
        n, m = (len(t), t[0].numel()) if t.dim() > 1 and t.numel() else (0, 0)
        r = min(self.r, n, m)
        return r if n * m > self.least * r * (n + m) else 0
