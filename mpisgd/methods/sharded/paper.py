"""Gradients, and parameters, as whole numbers of a scale for each block, between hosts alone.

Wang et al. 2023, "ZeRO++", sections 3.1 (qwZ) and 3.3 (qgZ), whose first hop, on a host, is exact here. Each
of p ranks owns a chunk of all elements; S_j is the sum of g_i of the ranks of host j. For the chunk of a rank
of host k:

    g <- (S_k + sum over the other hosts j of Q(S_j)) / p     in the order of the hosts
    y <- y - u(g),  x <- Q(y)                                 u: the update of the optimizer; one host: x <- y
    Q(v) = s round(v / s),  s = max |v| / L                   of each block of B elements of a parameter in it

With `sums` g is not divided by p. L and B of gradients and of parameters are two pairs of numbers.
"""

from dataclasses import dataclass

import torch

from mpisgd.methods.compression_kit import in_blocks
from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, alike, everyone, filled, weighted

__all__ = ["CodedGradients", "CodedParameters", "Masters"]


@dataclass(frozen=True)
class CodedGradients(Paper[None]):
    """Keeps nothing; `w.layout` has the pieces in each rank's chunk."""

    of_buckets = of_memory = True
    weighs = True

    L: int = 0  # 0: they travel as they are
    B: int = 0
    sums: bool = False

    def reduce(self, s: None, g: Vecs, w: World) -> tuple[None, Vecs]:
        g = filled(g if self.sums else weighted(g, w.weight))
        first = g[w.ranks[0]]
        sums = {h: Vec({n: w.sum({i: g[i][n] for i in h}) for n in first}) for h in w.hosts}
        out = first.each(lambda tensor: torch.zeros_like(tensor).flatten())
        for owner, chunk in zip(w.ranks, w.layout, strict=True):
            for piece in chunk:
                if piece.name not in first:
                    continue
                arrived = {h[0]: self.of_host(piece.of(S), owner in h) for h, S in sums.items()}
                out[piece.name][piece.begin : piece.end] = w.sum(arrived) / (1 if self.sums else len(w.ranks))
        return s, everyone(Vec({n: out[n].view(first[n].shape) for n in first}), w)

    def of_host(self, v: torch.Tensor, is_owners: bool) -> torch.Tensor:
        """Return the sum of a host as it arrives at the owner: rounded, if it comes from another host."""
        return v if is_owners or not self.L else in_blocks(v, self.L, self.B)


@dataclass(frozen=True)
class Masters:
    """y, which owners update."""

    y: Vec = alike(begin="copy")


@dataclass(frozen=True)
class CodedParameters(Paper[Masters]):
    """`gradients` says what becomes of these; it keeps nothing."""

    keeps = Masters
    of_buckets = of_memory = True
    weighs = True

    gradients: Paper[None]
    L: int
    B: int

    def reduce(self, s: Masters, g: Vecs, w: World) -> tuple[Masters, Vecs]:
        return s, self.gradients.reduce(None, g, w)[1]

    def update(self, s: Masters, x: Vecs, g: Vecs, w: World) -> tuple[Masters, Vecs]:
        i = w.ranks[0]
        y = s.y | {j: w.optimizer(j, s.y.only(x[j]), g[j]) for j in w.ranks}[i].only(g[i])
        return Masters(y), {j: x[j] | self.Q(y.only(g[i]), w) for j in w.ranks}

    def Q(self, y: Vec, w: World) -> Vec:
        """Return the parameters as they arrive: rounded in blocks, where there are several hosts."""
        out = y.each(lambda tensor: tensor.clone().flatten())
        for piece in (piece for chunk in w.layout for piece in chunk if piece.name in y):
            if len(w.hosts) > 1:
                out[piece.name][piece.begin : piece.end] = in_blocks(piece.of(y), self.L, self.B)
        return Vec({name: out[name].view(y[name].shape) for name in y})
