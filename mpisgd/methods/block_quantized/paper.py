"""Block quantization in two steps: ranks send codes to owners of chunks, and these send those of the mean.

Wang et al. 2023, "ZeRO++", sections 3.1 and 3.3 (qgZ): a sum of codes would be no code, so each owner adds up
what they stand for, and what it sends is quantized again. n ranks; `w.layout` has the pieces of parameters in
each owner's chunk. Error feedback as in Tang et al. 2019, "DoubleSqueeze"; without it e and d stay 0.

    s_i = Q(g_i + e_i);    e_i <- g_i + e_i - s_i     what a rank leaves out
    y   = mean of s_i + d;   d <- y - Q(y)            what owners leave out, each rank's of the chunk it owns
    g  <- Q(y)
    Q(v) = s round(v / s),  s = max |v| / L           of each block of B elements of a piece, the last shorter
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, filled, mean, own

__all__ = ["BlockQuantized", "State"]


@dataclass(frozen=True)
class State:
    """What is kept: what ranks have left out, and what owners have."""

    e: Vecs = own(default_factory=dict)
    d: Vecs = own(default_factory=dict)


@dataclass(frozen=True)
class BlockQuantized(Paper[State]):
    """One rank sends nothing."""

    of_chunks = of_buckets = of_memory = True

    L: int
    B: int
    feedback: bool = False

    def start(self, x: Vecs, w: World) -> State:
        return State({i: Vec() for i in w.ranks}, {i: Vec() for i in w.ranks})

    def reduce(self, s: State, g: Vecs, w: World) -> tuple[State, Vecs]:
        if len(w.ranks) == 1:
            return s, g
        v = {i: g_i + s.e[i].only(g_i) for i, g_i in filled(g).items()}
        sent = {i: self.Q(v_i, w) for i, v_i in v.items()}
        y = mean(sent, w) + s.d[w.ranks[0]].only(v[w.ranks[0]])
        taken = self.Q(y, w)
        if self.feedback:
            d = Vec({**s.d[w.ranks[0]], **(y - taken)})
            s = State({i: Vec({**s.e[i], **(v[i] - sent[i])}) for i in w.ranks}, dict.fromkeys(w.ranks, d))
        return s, dict.fromkeys(w.ranks, taken)

    def Q(self, v: Vec, w: World) -> Vec:
        """Return what arrives of v."""
        out = v.each(lambda tensor: torch.zeros(tensor.numel(), dtype=tensor.dtype))
        for name, begin, end in (piece for chunk in w.layout for piece in chunk if piece.name in v):
            blocks = torch.split(v[name].flatten()[begin:end], self.B)
            out[name][begin:end] = torch.cat([self.rounded(block) for block in blocks])
        return Vec({name: tensor.view(v[name].shape) for name, tensor in out.items()})

    def rounded(self, v: Tensor) -> Tensor:
        """Return the multiples of s that are nearest to the elements of a block."""
        s = v.abs().max() / self.L
        return s * (v / s).round() if s else torch.zeros_like(v)
