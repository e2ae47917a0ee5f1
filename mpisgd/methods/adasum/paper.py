"""Adasum: gradients are added as far as they are orthogonal.

Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation", for each parameter by itself, and
of more ranks pair by pair until one is left.

    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

    g <- Adasum(g_1, ..., g_p)                     of the gradients, or of the steps,
    x <- x + Adasum(y_1 - x, ..., y_p - x)         where y_i is what the optimizer of rank i makes of x
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, filled

__all__ = ["Adasum"]


@dataclass(frozen=True)
class Adasum(Paper[None]):
    """Keeps nothing."""

    of_steps: bool = False

    def reduce(self, s: None, g: Vecs, w: World) -> tuple[None, Vecs]:
        return s, g if self.of_steps else dict.fromkeys(w.ranks, adasum(list(filled(g).values())))

    def update(self, s: None, x: Vecs, g: Vecs, w: World) -> tuple[None, Vecs]:
        s, y = super().update(s, x, g, w)
        if not self.of_steps:
            return s, y
        joined = adasum([y[i] - x[i] for i in w.ranks])
        return s, {i: x[i] + joined for i in w.ranks}


def adasum(v: Sequence[Vec]) -> Vec:
    """Return the adaptive sum of any number, of each parameter by itself."""
    if len(v) == 1:
        return v[0]
    pairs = [v[place : place + 2] for place in range(0, len(v), 2)]
    return adasum([_of_two(*pair) if len(pair) == 2 else pair[0] for pair in pairs])


def _of_two(a: Vec, b: Vec) -> Vec:
    def share(mine: Tensor, other: Tensor) -> float:
        square = float(mine.double().square().sum())
        return 1 - float((mine.double() * other.double()).sum()) / (2 * square) if square else 1.0

    return Vec({name: share(a[name], b[name]) * a[name] + share(b[name], a[name]) * b[name] for name in a})
