"""Adasum: two gradients are added as far as they are orthogonal, and averaged as far as they are parallel.

Source: Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["adasum"]


def adasum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the adaptive sum of one tensor per rank, pair by pair; any number of them.

    Dot products and norms are taken in float64.
    """
    while len(tensors) > 1:
        pairs = [tensors[i : i + 2] for i in range(0, len(tensors), 2)]
        tensors = [_combined(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return tensors[0]


def _combined(a: Tensor, b: Tensor) -> Tensor:
    wide_a, wide_b = a.reshape(-1).double(), b.reshape(-1).double()
    dot = torch.dot(wide_a, wide_b)
    return (a * _share(dot, wide_a) + b * _share(dot, wide_b)).to(a.dtype)


def _share(dot: Tensor, wide: Tensor) -> float:
    """Return what is left of a gradient beside one that points its way: 1 - dot / (2 |gradient|^2)."""
    square = float(torch.dot(wide, wide))
    return 1.0 - float(dot) / (2.0 * square) if square > 0.0 else 1.0
