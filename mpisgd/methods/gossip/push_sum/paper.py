"""SGP: gossip on directed graphs, where only the columns of the matrix sum to 1.

Assran, Loizou, Ballas and Rabbat 2019, "Stochastic Gradient Push for Distributed Deep Learning", algorithm 1;
push-sum: Kempe, Dobra and Gehrke 2003.

    x_i <- x_i - u(g_i)            g_i at z_i, which the model has; u: the update of the optimizer
    x_i <- sum of P_ij x_j;   w_i <- sum of P_ij w_j
    z_i <- x_i / w_i

So the sums of all x_i and of all w_i do not change. Between steps there are z and w: x = w z.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpisgd.methods.paper_kit import Paper, Vecs, World, own, total

__all__ = ["PushSum", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: the weights w_i, which say nothing of each other without those of all ranks."""

    w: dict[int, float] = own(default_factory=dict, lost="rebuild")


@dataclass(frozen=True)
class PushSum(Paper[State]):
    """P(p, k): the matrix of p ranks the k-th time, from 0, that they mix, once in `every` steps."""

    P: Callable[[int, int], Sequence[Sequence[float]]]
    every: int = 1

    leaves_frozen: ClassVar[bool] = True

    def start(self, x: Vecs, w: World) -> State:
        return State(dict.fromkeys(w.ranks, 1.0))

    def update(self, s: State, x: Vecs, g: Vecs, w: World) -> tuple[State, Vecs]:
        z, weight = x, s.w
        s, moved = super().update(s, z, g, w)
        x = {i: weight[i] * z[i] + (moved[i] - z[i]) for i in w.ranks}
        if w.step % self.every == 0:
            P = self.P(len(w.ranks), w.step // self.every - 1)
            rows = {i: dict(zip(w.ranks, P_i, strict=True)) for i, P_i in zip(w.ranks, P, strict=True)}
            x = {i: total({j: P_ij * x[j] for j, P_ij in row.items()}, w) for i, row in rows.items()}
            weight = {i: sum(P_ij * weight[j] for j, P_ij in row.items()) for i, row in rows.items()}
        return State(weight), {i: x[i] / weight[i] for i in w.ranks}
