"""16 bits on the wire: gradients are rounded, added up in float32, and their mean is rounded once.

Micikevicius et al. 2018, "Mixed Precision Training": sums of 16-bit numbers are taken in float32.

    g <- R(mean of R(g_i))        R: rounding to `dtype`
"""

from dataclasses import dataclass

import torch

from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, filled, mean

__all__ = ["Cast"]


@dataclass(frozen=True)
class Cast(Paper[None]):
    """Keeps nothing."""

    rounds = False

    dtype: torch.dtype

    def reduce(self, s: None, g: Vecs, w: World) -> tuple[None, Vecs]:
        g = filled(g)
        rounded = mean({i: g_i.each(lambda t: t.to(self.dtype)) for i, g_i in g.items()}, w)
        first = g[w.ranks[0]]
        return s, dict.fromkeys(w.ranks, Vec({name: t.to(first[name].dtype) for name, t in rounded.items()}))
