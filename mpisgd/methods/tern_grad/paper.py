"""TernGrad: an element is -1, 0 or 1 times the largest magnitude of its parameter's gradient.

Wen, Xu, Yan, Wu, Wang, Chen and Li 2017, "TernGrad", algorithm 1, with layer-wise ternarizing; clipping is to
c standard deviations beyond the magnitude of the mean, which the paper takes to be 0.

    s    = max |v_j|
    T(v) = s sign(v) b      b_j = 1 with probability |v_j| / s, else 0

That is s floor(v_j / s + u) with u uniform in [0, 1), for elements of either sign.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from mpisgd.methods.compression_kit import Compressor
from mpisgd.methods.paper_kit import Draws, Vec, World

__all__ = ["TernGrad"]


@dataclass(frozen=True, kw_only=True)
class TernGrad(Compressor):
    """Keeps nothing."""

    of_buckets = of_memory = counts = True

    feedback: bool = False
    c: float = math.inf

    def C(self, v: Vec, w: World, draw: Draws) -> Vec:
        """See `Compressor`."""
        return Vec({name: self._ternary(t, draw.uniform(name, t)) for name, t in v.items()})

    def _ternary(self, v: Tensor, u: Tensor) -> Tensor:
        if self.c < math.inf:
            most = v.mean().abs() + self.c * v.std(correction=0)
            v = v.clamp(-most, most)
        s = v.abs().max() if v.numel() else v.sum()
        return (v / s + u).floor() * s if s else v
