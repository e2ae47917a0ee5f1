"""`BlockQuantized`: a few bits per element and a scale for each block, in two steps: ZeRO++'s gradients.

Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mpisgd.arguments import check_flag, check_positive, shown
from mpisgd.compress.block_code import BlockCode
from mpisgd.compress.compressor import BucketLayout, BucketReducer, Compressor
from mpisgd.errors import InvalidArgument
from mpisgd.methods.block_quantized import paper
from mpisgd.methods.coding import Coding
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.two_step.two_step_exchange import Errors
from mpisgd.methods.two_step.two_step_reducer import TwoStepReducer, lengths_of

__all__ = ["BlockQuantized"]


@dataclass(frozen=True)
class BlockQuantized(Compressor):
    """Sends each element as a whole number of `bits` bits, times a scale of its block.

    With L = 2^(bits - 1) - 1, for each block v of `block` elements

        s    = max |v| / L
        Q(v) = s round(v / s)

    Every rank owns a chunk of the bucket. Rank i sends Q(g_i) of each chunk to its owner, which averages them
    in the order of the ranks; all ranks receive Q of that average, with the same bits. Blocks begin anew with
    each parameter and each chunk.

    Between hosts use `PerHost(BlockQuantized(bits=4))`, or `Sharded(gradients=BlockQuantized(bits=4))`: the
    ranks of a host then average in shared memory, without quantization, where ZeRO++ quantizes a first time.
    If a block has an infinite or NaN gradient, some or all of its elements become infinite or NaN.

    Attributes:
        bits: bits of an element, including the sign; 2 to 8.
        block: elements that share a scale.
        error_feedback: whether the rounding errors of both steps are added to the next gradient: each rank
            keeps that of its own gradient, and that of the average of its chunk.

    Raises:
        InvalidArgument: at construction.

    Cost: for n elements each rank sends 2 (size - 1) / size times `bits` n bits, and a scale for each block.
        On two ranks that is as much as with a compressor that sends its codes to all ranks, on more ranks it
        is less.
    """

    bits: int = 4
    block: int = 256
    error_feedback: bool = False

    @classmethod
    def examples(cls) -> Sequence["BlockQuantized"]:
        """See `Compressor`."""
        return (cls(), cls(bits=8, block=7, error_feedback=True))

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise InvalidArgument(f"BlockQuantized: bits={shown(self.bits)}; expected 2 to 8")
        check_positive("BlockQuantized", "block", self.block, whole=True)
        check_flag("BlockQuantized", "error_feedback", self.error_feedback)

    def reducer(self, layout: BucketLayout) -> BucketReducer:
        """Return the reducer, which sends the codes of a bucket to the owners of chunks, and back."""
        code = partial(BlockCode, bits=self.bits, block=self.block)
        return TwoStepReducer(lengths_of(layout), layout, code, Errors() if self.error_feedback else None)

    def code_of(self, lengths: Sequence[int], dtype: torch.dtype) -> BlockCode:
        """Return the code of a message with pieces of these lengths, in elements, without padding."""
        return BlockCode(lengths, dtype, len(lengths), sum(lengths), bits=self.bits, block=self.block)

    @property
    def largest(self) -> int:
        """L, the largest multiple of a scale."""
        return (1 << (self.bits - 1)) - 1

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`.

        Codes and scales go to owners of chunks, those of the mean to all.
        """
        collectives = ("all_to_all", "all_gather")
        if self.error_feedback:  # what is meant takes the place of the residual
            return Coding(collectives, element_s=12e-9, kept=lambda size: 1 + 1 / size)
        return Coding(collectives, element_s=12e-9, copies=0.0, of_chunk=1.25)  # a chunk, and its codes

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.BlockQuantized(L=self.largest, B=self.block, feedback=self.error_feedback)
