"""CHOCO-SGD: ranks send compressed changes of their models, and mix what these add up to.

Koloskova, Stich and Jaggi 2019, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
Communication", algorithm 2. h_i, x with a hat in the paper, is the copy of x_i that its neighbours have.

    x_i <- x_i - u(g_i)                             u: the update of the optimizer
    q_i  = C(x_i - h_i);   h_i <- h_i + q_i         sent to the neighbours
    x_i <- x_i + c (sum of W_ij (h_j - h_i))        c: the consensus step size, gamma in the paper

h_i begins as x_i, and not as 0: the first message is not the whole model in compressed form.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mpisgd.methods.compression_kit import Compressor
from mpisgd.methods.paper_kit import Paper, Vecs, World, own, total

__all__ = ["Choco", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: the copies, of use only where all ranks have theirs."""

    h: Vecs = own(default_factory=dict, lost="rebuild")


@dataclass(frozen=True)
class Choco(Paper[State]):
    """W(p, k): the matrix of p ranks. C is the operator of the compressor, without its error feedback."""

    W: Callable[[int, int], Sequence[Sequence[float]]]
    c: float
    every: int = 1

    leaves_frozen: ClassVar[bool] = True

    def start(self, x: Vecs, w: World) -> State:
        return State(dict(x))

    def after(self, s: State, x: Vecs, w: World) -> tuple[State, Vecs]:
        if w.step % self.every:
            return s, x
        assert isinstance(w.wire, Compressor)
        C, h = w.wire.C, {}
        for place, i in enumerate(w.ranks):
            h[i] = s.h[i] + C(x[i] - s.h[i].only(x[i]), w, w.draw(w.step, place))
        W = zip(w.ranks, self.W(len(w.ranks), 0), strict=True)
        rows = {i: dict(zip(w.ranks, W_i, strict=True)) for i, W_i in W}
        mixed = {
            i: total({j: W_ij * (h[j] - h[i]).only(x[i]) for j, W_ij in row.items()}, w)
            for i, row in rows.items()
        }
        return State(h), {i: x[i] + self.c * mixed[i] for i in w.ranks}
