"""`TernGrad`: two bits per element, for -1, 0 and 1.

Wen, Xu, Yan, Wu, Wang, Chen and Li 2017, "TernGrad: Ternary Gradients to Reduce Communication in Distributed
Deep Learning".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mpisgd.accelerator.buffers import cut_by
from mpisgd.arguments import check_positive, check_seed
from mpisgd.compress.compressor import BucketLayout
from mpisgd.compress.levels import Levels, segments_of
from mpisgd.compress.quantizing_reducer import QuantizingReducer
from mpisgd.compress.residual import ErrorMemory, Waiting
from mpisgd.compress.wide_compressor import WideCompressor
from mpisgd.methods.coding import Coding
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.tern_grad import paper

__all__ = ["TernGrad", "TernaryCodec"]


@dataclass(frozen=True)
class TernGrad(WideCompressor):
    """Sends -1, 0 or 1 for each element, and the largest magnitude of each parameter's gradient.

        s      = max |g_j|                     of a parameter (layer-wise ternarizing)
        T(g_j) = s sign(g_j) b_j               b_j = 1 with probability |g_j| / s, else 0
        g      = mean of T(g_i) over the ranks (or the sum, with op=SUM)

    The expectation of T(g) is g. Large elements cause a large s, and so much noise. `clip_sigmas` first clips
    magnitudes to this many standard deviations of the parameter's gradient above the magnitude of its mean,
    which introduces a bias. The paper assumes that the mean is 0; with that, a gradient of equal elements
    would be clipped to 0.

    Attributes:
        clip_sigmas: 2.5 in the paper; None: no clipping.
        seed: seed of the random numbers, which differ by rank and step.

    Raises:
        InvalidArgument: at construction.

    Cost: sends (size - 1) times 2 bits of each element, and a number per parameter; every rank decodes what
        all have sent.
    """

    clip_sigmas: float | None = None
    seed: int = 0

    @classmethod
    def examples(cls) -> Sequence["TernGrad"]:
        """See `Compressor`."""
        return (cls(), cls(clip_sigmas=1.5, seed=1))

    def __post_init__(self) -> None:
        if self.clip_sigmas is not None:
            check_positive("TernGrad", "clip_sigmas", self.clip_sigmas)
        check_seed("TernGrad", self.seed)

    def wide_reducer(self, layout: BucketLayout) -> QuantizingReducer:
        """Return the reducer, which sends the codes of a bucket."""
        return QuantizingReducer(
            TernaryCodec(layout, self.clip_sigmas), layout.numel, self.seed, ErrorMemory(), Waiting()
        )

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`.

        Codes and a scale per parameter go to all ranks.
        """
        return Coding(element_s=30e-9, copies=0.25 if self.clip_sigmas is None else 1.25)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.TernGrad(c=math.inf if self.clip_sigmas is None else self.clip_sigmas)


class TernaryCodec(Levels):
    """One level, and a scale per parameter."""

    def __init__(self, layout: BucketLayout, clip_sigmas: float | None) -> None:
        self._numels = [numel for shape in layout.shapes if (numel := shape.numel())]
        self._clip_sigmas = clip_sigmas
        super().__init__(layout, 1, 2, segments_of(self._numels), math.inf)

    def compress(self, flat: Tensor, random: np.random.Generator) -> Tensor:
        """Return the codes and the scales."""
        return super().compress(self._clipped(flat), random)

    def _clipped(self, flat: Tensor) -> Tensor:
        if self._clip_sigmas is None:
            return flat
        clipped = flat.clone()
        for part in cut_by(clipped, self._numels):
            limit = part.mean().abs() + self._clip_sigmas * part.std(correction=0)
            part.clamp_(-limit, limit)
        return clipped
