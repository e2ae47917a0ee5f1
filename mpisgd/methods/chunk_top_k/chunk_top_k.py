"""`ChunkTopK`: the largest elements of each chunk travel, in a few bits; the rest is kept, and fades.

Sarfi, Therien, Lidin and Belilovsky 2025, "Communication Efficient LLM Pre-training with SparseLoCo".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpisgd.arguments import check_positive, shown
from mpisgd.compress.compressor import BucketLayout, Traits
from mpisgd.compress.quantizing_reducer import QuantizingReducer
from mpisgd.compress.residual import Waiting, memory_of
from mpisgd.compress.wide_compressor import WideCompressor
from mpisgd.errors import InvalidArgument
from mpisgd.methods.chunk_top_k import paper
from mpisgd.methods.chunk_top_k.chunk_code import ChunkCode, place_bits
from mpisgd.methods.coding import Coding
from mpisgd.methods.paper_kit import Paper

__all__ = ["ChunkTopK", "check_chunks"]

MOST_ELEMENTS = 2**16  # of a chunk, whose places have two bytes at most


def check_chunks(name: str, keep: Any, chunk: Any, bits: Any, decay: Any) -> None:
    """Raise InvalidArgument unless these can be arguments of `ChunkTopK`; `name`: who is asked."""
    for what, value in (("keep", keep), ("chunk", chunk)):
        check_positive(name, what, value, whole=True)
    if chunk > MOST_ELEMENTS:
        raise InvalidArgument(f"{name}: chunk={chunk}; expected at most {MOST_ELEMENTS} elements")
    if keep > chunk:
        raise InvalidArgument(f"{name}: keep={keep}; expected at most chunk={chunk}")
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise InvalidArgument(f"{name}: bits={shown(bits)}; expected 2 to 8")
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
        raise InvalidArgument(f"{name}: error_decay={shown(decay)}; expected a number from 0 to 1")


@dataclass(frozen=True)
class ChunkTopK(WideCompressor):
    """Sends the `keep` elements of largest magnitude of each chunk of `chunk` elements, in `bits` bits.

        m_i = g_i + error_decay e_i            gradient and residual of rank i
        s_i = Q(m_i) at the largest of each chunk, else 0
        e_i = m_i - s_i
        g   = mean of s_i over the ranks       (or the sum, with op=SUM)

    With the decay the residual acts as a local momentum, which takes the place of the outer momentum in
    `mpisgd.SparseLoCo`. With `error_decay` below 1 a part of what is left out is never sent.

    A chunk has consecutive elements of a parameter, in the order of its memory. The last chunk of a parameter
    may be shorter; the same share of it is sent, but at least one element. Of equal magnitudes the first ones
    are sent. Q(v) has the sign of v and the nearest of 2^(bits - 1) levels of magnitude, which are evenly
    spaced from the smallest to the largest magnitude that is sent of the chunk. So no element has an error
    larger than itself; with `bits=2` there are two levels. If a chunk has an infinite or NaN element, all
    elements that are sent of it become NaN.

    Error feedback, its decay, top-k of chunks, and the mean over all ranks are those of the paper; the
    quantization is not. In published programs for the method a code is one of four ranges of the sent values
    of a tensor, by default 1.5 standard deviations wide, and decodes to the mean of its range; chunks are
    blocks of 64 x 64 elements of a matrix; and the mean of an element is over the ranks that have sent it.
    Here the levels of a chunk need no sums, so that results do not depend on the order of additions.

    Attributes:
        keep: number of elements that are sent of a whole chunk.
        chunk: number of elements of a chunk, 1 to 65536.
        bits: number of bits for each element that is sent, including its sign; 2 to 8.
        error_decay: share of what was not sent that is added to the next gradient, 0 to 1. With 0 no residual
            is kept.

    Raises:
        InvalidArgument: at construction.

    Cost: each rank sends (size - 1) times, for every chunk, `keep` times log2(chunk) + bits bits, and two
        numbers: by default 1/136 of float32 gradients. Keeps one residual the size of the
        gradients, this rank's own: see `mpisgd.compress.residual`.
    """

    keep: int = 64
    chunk: int = 4096
    bits: int = 2
    error_decay: float = 0.95

    @classmethod
    def examples(cls) -> Sequence["ChunkTopK"]:
        """See `Compressor`."""
        return (cls(), cls(keep=2, chunk=5, bits=3, error_decay=1.0))

    def __post_init__(self) -> None:
        check_chunks("ChunkTopK", self.keep, self.chunk, self.bits, self.error_decay)

    @cached_property
    def traits(self) -> Traits:
        """A part of what is not sent is added to the next gradient."""
        return Traits(has_error_feedback=self.error_decay > 0, fades=0 < self.error_decay < 1)

    def codec(self, layout: BucketLayout) -> ChunkCode:
        """Return the codec C of a bucket.

        The largest element of each chunk is sent without error, so |x - C(x)|^2 <= (1 - 1 / chunk) |x|^2.
        """
        return ChunkCode(layout, keep=self.keep, chunk=self.chunk, bits=self.bits)

    def wide_reducer(self, layout: BucketLayout) -> QuantizingReducer:
        """Return the reducer, which sends the largest elements of a bucket."""
        state = Waiting()
        memory = memory_of(layout, self.error_decay > 0, state, self.error_decay)
        return QuantizingReducer(self.codec(layout), layout.numel, 0, memory, state)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`.

        Indices and codes are sent to all ranks. While they are packed, each part of an element takes one
        byte, and one more for each of its bits if these do not divide a byte evenly.
        """
        parts = [*place_bits(self.chunk), self.bits]
        nbytes = len(parts) + max(0 if 8 % bits == 0 else bits for bits in parts)
        return Coding(element_s=40e-9, copies=self.keep / self.chunk * nbytes / 4)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.ChunkTopK(
            keep=self.keep,
            chunk=self.chunk,
            L=(1 << (self.bits - 1)) - 1,
            feedback=self.error_decay > 0,
            beta=float(self.error_decay),
        )
