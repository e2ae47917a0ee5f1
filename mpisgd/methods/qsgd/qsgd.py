"""`QSGD`: a few bits per element.

Alistarh, Grubic, Li, Tomioka and Vojnovic 2017, "QSGD: Communication-Efficient SGD via Gradient Quantization
and Encoding".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpisgd.arguments import check_flag, check_positive, check_seed, shown
from mpisgd.compress.compressor import BucketLayout
from mpisgd.compress.levels import Levels, segments_of
from mpisgd.compress.quantizing_reducer import QuantizingReducer
from mpisgd.compress.residual import Waiting, memory_of
from mpisgd.compress.wide_compressor import WideCompressor
from mpisgd.errors import InvalidArgument
from mpisgd.methods.coding import Coding
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.qsgd import paper

__all__ = ["QSGD"]

NORMS = {"max": math.inf, "l2": 2.0}
CONTRACTS_FROM_BITS = 4


@dataclass(frozen=True)
class QSGD(WideCompressor):
    """Sends one of 2 L + 1 levels of its segment's norm for each element, rounded at random without bias.

    With L = 2^(bits - 1) - 1 levels and the norm |v| of a segment of `segment` elements

        Q(v_j) = |v| sign(v_j) xi_j / L        xi_j = l + 1 with probability L |v_j| / |v| - l, else l,
                                               where l is the whole part of L |v_j| / |v|
        g      = mean of Q(g_i) over the ranks (or the sum, with op=SUM)

    The expectation of Q(v) is v. Codes have a fixed number of bits; the paper's Elias coding is not used.

    Attributes:
        bits: bits of an element, including the sign; 2 to 8.
        segment: elements that share a norm (the paper's bucket size); a parameter's last may have less.
        norm: "max", the largest magnitude (the paper's experiments), or "l2" (its analysis).
        error_feedback: whether the rounding error is added to the next gradient. The error must be smaller
            than the gradient then: use 4 bits or more with "max".
        seed: seed of the random numbers, which differ by rank and step.

    Raises:
        InvalidArgument: at construction.

    Cost: sends (size - 1) times bits of each element, and a norm per segment; every rank decodes what all
        have sent.
    """

    bits: int
    segment: int = 512
    norm: str = "max"
    error_feedback: bool = False
    seed: int = 0

    @classmethod
    def examples(cls) -> Sequence["QSGD"]:
        """See `Compressor`."""
        return (cls(bits=4), cls(bits=2, segment=5, norm="l2", error_feedback=True, seed=1))

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise InvalidArgument(f"QSGD: bits={shown(self.bits)}; expected 2 to 8")
        check_positive("QSGD", "segment", self.segment, whole=True)
        if self.norm not in NORMS:
            raise InvalidArgument(f"QSGD: norm={shown(self.norm)}; expected one of {', '.join(NORMS)}")
        check_flag("QSGD", "error_feedback", self.error_feedback)
        check_seed("QSGD", self.seed)

    def codec(self, layout: BucketLayout) -> Levels | None:
        """Return the codec of a bucket; None if the levels are too coarse for error feedback."""
        return self._levels(layout) if self.bits >= CONTRACTS_FROM_BITS else None

    def _levels(self, layout: BucketLayout) -> Levels:
        segments = segments_of([shape.numel() for shape in layout.shapes], self.segment)
        return Levels(layout, 2 ** (self.bits - 1) - 1, self.bits, segments, NORMS[self.norm])

    def wide_reducer(self, layout: BucketLayout) -> QuantizingReducer:
        """Return the reducer, which sends the codes of a bucket."""
        state = Waiting()
        memory = memory_of(layout, self.error_feedback, state)
        return QuantizingReducer(self._levels(layout), layout.numel, self.seed, memory, state)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`. Codes and norms go to all ranks."""
        return Coding(element_s=30e-9, copies=0.25)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        norm = math.inf if self.norm == "max" else 2.0
        return paper.QSGD(
            L=2 ** (self.bits - 1) - 1, segment=self.segment, norm=norm, feedback=self.error_feedback
        )
