"""Top-k: of each parameter the k elements of largest magnitude are sent, and the rest is kept.

Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent"; Stich, Cordonnier and Jaggi
2018, "Sparsified SGD with Memory", definition 2.1. The memory is that of `paper_kit.compressed`, in units of
the gradient: Stich has the learning rate in it.

    C(v) = v where |v| is among the k largest of a parameter's n elements, else 0;   k = max(1, ratio n)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mpisgd.methods.paper_kit import Compressor, Draws, Vec

__all__ = ["TopK", "largest"]


def largest(v: Tensor, ratio: float) -> Tensor:
    """Return v with zeros in place of all but its largest elements."""
    k = max(1, round(ratio * v.numel()))
    chosen = v.flatten().abs().argsort(descending=True, stable=True)[:k]
    kept = torch.zeros_like(v).flatten()
    kept[chosen] = v.flatten()[chosen]
    return kept.view(v.shape)


@dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """Has the residual of error feedback."""

    ratio: float

    def C(self, v: Vec, draw: Draws) -> Vec:
        """See `Compressor`."""
        return v.each(lambda tensor: largest(tensor, self.ratio))
