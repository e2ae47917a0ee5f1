"""The 1-bit average: ranks send signs to the owners of chunks, and these send the signs of the mean to all.

Tang et al. 2021, "1-bit Adam", section 5 and algorithm 1; Tang et al. 2019, "DoubleSqueeze".
n ranks; `w.layout` has the pieces of parameters in each owner's chunk.

    s_i = C(v_i + e_i);    e_i <- v_i + e_i - s_i     the worker's error
    y   = mean of s_i + d;   d <- y - C(y)            the server's, each rank's for the chunk that it owns
    v  <- C(y)
    C(v) = |v|_1 / k sign(v)                          of a piece's k elements
"""

from dataclasses import dataclass

import torch

from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, everyone, filled, mean, own, signs

__all__ = ["State", "TwoStep"]


@dataclass(frozen=True)
class State:
    """What is kept: the errors of workers, and of servers, by owner."""

    e: Vecs = own(default_factory=dict)
    d: Vecs = own(default_factory=dict)


class TwoStep(Paper[State]):
    """One rank sends nothing."""

    of_chunks = of_buckets = of_memory = True

    def start(self, x: Vecs, w: World) -> State:
        return State(everyone(Vec(), w), everyone(Vec(), w))

    def reduce(self, s: State, g: Vecs, w: World) -> tuple[State, Vecs]:
        if len(w.ranks) == 1:
            return s, g
        m = {i: g_i + s.e[i].only(g_i) for i, g_i in filled(g).items()}
        sent = {i: self.C(m_i, w) for i, m_i in m.items()}
        e, d = {i: s.e[i] | (m[i] - sent[i]) for i in w.ranks}, s.d[w.ranks[0]]
        y = mean(sent, w) + d.only(m[w.ranks[0]])
        v = self.C(y, w)
        return State(e, everyone(d | (y - v), w)), everyone(v, w)

    def C(self, v: Vec, w: World) -> Vec:
        """Return what arrives of v."""
        out = v.each(lambda tensor: torch.zeros(tensor.numel(), dtype=tensor.dtype))
        for name, begin, end in (piece for chunk in w.layout for piece in chunk if piece.name in v):
            out[name][begin:end] = signs(v[name].flatten()[begin:end])
        return Vec({name: tensor.view(v[name].shape) for name, tensor in out.items()})
