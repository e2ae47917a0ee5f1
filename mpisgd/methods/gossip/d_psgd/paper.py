"""D-PSGD: every rank has a model of its own, and mixes it with those of its neighbours.

Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?", algorithm 1 (combine,
then adapt); with the update first: Chen and Sayed 2012, "Diffusion Adaptation Strategies" (adapt, then
combine).

    x_i <- sum of W_ij x_j;   x_i <- x_i - u(g_i)       g_i at x_i from before; u: the update of the optimizer
    x_i <- x_i - u(g_i);   x_i <- sum of W_ij x_j       with the update first

W [p, p] is doubly stochastic, so the mean of all x_i does not change; W_ij > 0: j is a neighbour of i.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpisgd.methods.paper_kit import Paper, Vecs, World, total

__all__ = ["DPSGD"]


@dataclass(frozen=True)
class DPSGD(Paper[None]):
    """W(p, k): the matrix of p ranks the k-th time, from 0, that they mix, once in `every` steps."""

    W: Callable[[int, int], Sequence[Sequence[float]]]
    update_first: bool = True
    every: int = 1

    leaves_frozen: ClassVar[bool] = True

    def update(self, s: None, x: Vecs, g: Vecs, w: World) -> tuple[None, Vecs]:
        return super().update(s, x if self.update_first else self._mixed(x, w), g, w)

    def after(self, s: None, x: Vecs, w: World) -> tuple[None, Vecs]:
        return s, self._mixed(x, w) if self.update_first else x

    def _mixed(self, x: Vecs, w: World) -> Vecs:
        if w.step % self.every:
            return x
        W = self.W(len(w.ranks), w.step // self.every - 1)
        return {
            i: total({j: W_ij * x[j] for j, W_ij in zip(w.ranks, W_i, strict=True)}, w)
            for i, W_i in zip(w.ranks, W, strict=True)
        }
