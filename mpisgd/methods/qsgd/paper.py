"""QSGD: an element is one of L levels of the norm of its segment, rounded at random without bias.

Alistarh, Grubic, Li, Tomioka and Vojnovic 2017, "QSGD", section 3.1; segments are its buckets, and the
largest magnitude is the norm of its experiments.

    Q(v_j) = |v| sign(v_j) xi_j / L      xi_j = l + 1 with probability L |v_j| / |v| - l, else l,
                                         where l is the whole part of L |v_j| / |v|

That is |v| / L floor(L v_j / |v| + u) with u uniform in [0, 1), for elements of either sign.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mpisgd.methods.compression_kit import Compressor, by_rows
from mpisgd.methods.paper_kit import Draws, Vec, World

__all__ = ["QSGD", "rounded"]


def rounded(v: Tensor, u: Tensor, L: int, norm: float) -> Tensor:
    """Return Q(v) of segments, v [segments, elements]; zeros stay zeros."""
    length = torch.linalg.vector_norm(v, norm, dim=1, keepdim=True)
    return torch.where(length > 0, (L * v / length + u).floor() * length / L, v)


@dataclass(frozen=True, kw_only=True)
class QSGD(Compressor):
    """Has the residual of error feedback, where that is asked for; the paper has none."""

    of_buckets = of_memory = counts = True

    feedback: bool = False
    L: int
    segment: int
    norm: float = math.inf

    def C(self, v: Vec, w: World, draw: Draws) -> Vec:
        """See `Compressor`."""
        found = Vec()
        for name, tensor in v.items():
            flat, u = tensor.flatten(), draw.uniform(name, tensor).flatten()
            levels = by_rows(partial(rounded, L=self.L, norm=self.norm), self.segment, flat, u)
            found[name] = levels.view(tensor.shape)
        return found
