"""Dion: a momentum of which a part of low rank is taken in each step, orthonormal.

Ahn, Xu, Abreu and Langford 2025, "Dion: Distributed Orthonormalized Updates", algorithm 1. For a matrix
X [m, n] with gradient G, the mean of the ranks', momentum M [m, n] and right factor Q [n, r]:

    B = M + G
    P = orthonormal basis of B Q              [m, r], one step of a power iteration from the last Q
    R = B^T P                                 [n, r]
    M = B - (1 - mu) P R^T                    what is taken away is fed back as errors are
    Q = R with columns of norm 1
    X = (1 - lr decay) X - lr scale P Q^T

r = ceil(fraction min(m, n)); the first Q are normal numbers. What is no matrix is the wrapped optimizer's:
AdamW in the paper.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, alike, filled, mean

__all__ = ["Dion", "State", "dion"]


@dataclass(frozen=True)
class State:
    """What is kept, of matrices."""

    M: Vec = alike(default_factory=Vec)
    Q: Vec = alike(default_factory=Vec)


@dataclass(frozen=True)
class Dion(Paper[State]):
    """`scale` is of a matrix's shape; eps keeps columns of zeros from a division by 0."""

    of_memory = True

    lr: float
    mu: float = 0.95
    decay: float = 0.0
    fraction: float = 0.25
    scale: Callable[[torch.Size], float] = lambda shape: 1.0
    eps: float = 1e-8

    def start(self, x: Vecs, w: World) -> State:
        matrices = {name: X for name, X in x[w.ranks[0]].items() if X.dim() == 2}
        first = w.draw(0, None)
        r = {name: max(1, ceil(self.fraction * min(X.shape))) for name, X in matrices.items()}
        Q = {name: first.normal(name, X, r[name]) for name, X in matrices.items()}
        return State(Vec(matrices).each(torch.zeros_like), Vec(Q))

    def update(self, s: State, x: Vecs, g: Vecs, w: World) -> tuple[State, Vecs]:
        G, M, Q, new = mean(filled(g), w), Vec(s.M), Vec(s.Q), Vec()
        rest = {i: w.optimizer(i, x[i], G.without(s.M)) for i in w.ranks}
        for name in G.only(s.M):
            X = x[w.ranks[0]][name]
            M[name], Q[name], step = dion(G[name], M[name], Q[name], self.mu, self.eps)
            new[name] = (1 - self.lr * self.decay) * X - self.lr * self.scale(X.shape) * step
        return State(M, Q), {i: rest[i] | new for i in w.ranks}


def dion(G: Tensor, M: Tensor, Q: Tensor, mu: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return M, Q and P Q^T after a step."""
    B = M + G
    P = torch.linalg.qr(B @ Q).Q
    R = B.T @ P
    Q = R / (R.norm(dim=0) + eps)
    return B - (1 - mu) * P @ R.T, Q, P @ Q.T
