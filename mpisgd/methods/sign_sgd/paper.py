"""signSGD: every rank sends the signs of its gradient, and all take the sign that most of them have.

Bernstein, Wang, Azizzadenesheli and Anandkumar 2018, "signSGD", algorithms 1 and 3 (majority vote).

    g <- sign(sum of sign(g_i))        with the vote: 0 where as many have sent 1 as -1
    g <- mean of sign(g_i)             without

One bit knows no 0: where the paper has sign(0) = 0, a rank sends 1 and -1 in turn.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpisgd.methods.paper_kit import Paper, Vecs, World, alike, filled, mean, total

__all__ = ["SignSGD", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: how many reductions there were."""

    k: int = alike(0)


@dataclass(frozen=True)
class SignSGD(Paper[State]):
    """There is no error feedback."""

    keeps = State
    counts = True

    vote: bool = True

    def reduce(self, s: State, g: Vecs, w: World) -> tuple[State, Vecs]:

        def sign(tensor: Tensor) -> Tensor:
            return (2.0 * (tensor >= 0 if s.k % 2 == 0 else tensor > 0) - 1.0).to(tensor.dtype)

        sent = {i: g_i.each(sign) for i, g_i in filled(g).items()}
        taken = total(sent, w).each(torch.sign) if self.vote else mean(sent, w)
        return State(s.k + 1), dict.fromkeys(w.ranks, taken)
