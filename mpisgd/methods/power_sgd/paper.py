"""PowerSGD: a matrix of gradients is sent as the product of two narrow ones, by one power iteration a step.

Vogels, Karimireddy and Jaggi 2019, "PowerSGD", algorithms 1 and 2; a parameter is a matrix [n, m], of its
first dimension and all others. r: the rank; p ranks.

    M_i = G_i + E_i                           error feedback
    P   = mean of M_i Q                       [n, r]; Q: of the step before, at first normal numbers
    P   = orthonormal basis of P              by Gram and Schmidt
    Q   = mean of M_i^T P                     [m, r]
    G   = P Q^T;   E_i = M_i - G

Vectors are sent as they are, and so are all gradients in the first T steps, and matrices for which r (n + m)
times `least` is not less than n m.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpisgd.methods.paper_kit import Paper, Vec, World, alike, filled, mean, own

__all__ = ["PowerSGD", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: residuals, factors, and how many reductions there were."""

    e: dict[int, Vec] = own(default_factory=dict)
    Q: Vec = alike(default_factory=Vec)
    k: int = alike(0)


@dataclass(frozen=True)
class PowerSGD(Paper[State]):
    """The paper has no T, and feedback always."""

    of_memory = True

    r: int
    T: int = 0
    feedback: bool = True
    least: float = 1.0

    def start(self, x: dict[int, Vec], w: World) -> State:
        """See `Paper`."""
        first = w.draw(0, None)
        matrices = {name: t.flatten(1) for name, t in x[w.ranks[0]].items() if self._rank(t)}
        return State(
            {i: Vec() for i in w.ranks},
            Vec({name: first.normal(name, t, self._rank(t)) for name, t in matrices.items()}),
        )

    def reduce(self, s: State, g: dict[int, Vec], w: World) -> tuple[State, dict[int, Vec]]:
        """See `Paper`."""
        g, s = filled(g), replace(s, k=s.k + 1)
        names = [name for name in g[w.ranks[0]] if name in s.Q] if s.k > self.T else []
        G, Q, E = mean(g, w), s.Q, dict(s.e)
        for name in names:
            M = {i: (g[i] + s.e[i])[name].flatten(1) for i in w.ranks}
            P = orthonormal(w.sum({i: M[i] @ s.Q[name] for i in w.ranks}) / len(w.ranks))
            q = w.sum({i: M[i].T @ P for i in w.ranks}) / len(w.ranks)
            Q, G = Vec({**Q, name: q}), Vec({**G, name: (P @ q.T).view(G[name].shape)})
            if self.feedback:
                E = {i: Vec({**E[i], name: M[i].view(G[name].shape) - G[name]}) for i in w.ranks}
        return State(E, Q, s.k), dict.fromkeys(w.ranks, G)

    def _rank(self, t: Tensor) -> int:
        n, m = (len(t), t[0].numel()) if t.dim() > 1 and t.numel() else (0, 0)
        r = min(self.r, n, m)
        return r if n * m > self.least * r * (n + m) else 0


def orthonormal(P: Tensor) -> Tensor:
    """Gram and Schmidt, twice over; of zeros the first unit vectors, with which the next Q is found again."""
    if not P.any():
        return torch.eye(*P.shape, dtype=P.dtype)
    columns: list[Tensor] = []
    for column in P.T:
        for other in columns * 2:
            column = column - (other @ column) * other
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)
