"""Natural compression: an element becomes one of the two powers of two beside it, at random without bias.

Horvath, Ho, Horvath, Sahu, Canini and Richtarik 2019, "Natural Compression for Distributed Deep Learning".

    C(t) = sign(t) 2^a           with probability 2 - |t| / 2^a,   for 2^a <= |t| < 2^(a + 1)
         = sign(t) 2^(a + 1)     else
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpisgd.methods.compression_kit import Compressor
from mpisgd.methods.paper_kit import Draws, Vec, World

__all__ = ["Natural"]


@dataclass(frozen=True, kw_only=True)
class Natural(Compressor):
    """Has the residual of error feedback, where that is asked for; the paper has none."""

    of_buckets = of_memory = counts = True

    feedback: bool = False

    def C(self, v: Vec, w: World, draw: Draws) -> Vec:
        """See `Compressor`."""
        return Vec({name: _power(t, draw.uniform(name, t)) for name, t in v.items()})


def _power(t: Tensor, u: Tensor) -> Tensor:
    fraction, exponent = torch.frexp(t.abs())  # |t| = fraction 2^exponent, fraction in [1/2, 1)
    lower = torch.ldexp(torch.ones_like(t), exponent - 1)
    goes_up = 2 * fraction - 1 + u >= 1
    return torch.where(goes_up, 2 * lower, lower).where(t != 0, 0.0) * t.sign()
