"""`Natural`: sign and exponent of each element, 9 bits of a float32.

Horvath, Ho, Horvath, Sahu, Canini and Richtarik 2019, "Natural Compression for Distributed Deep Learning".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.arguments import check_flag, check_seed
from mpisgd.compress.bit_packing import pack, packed_size, unpack
from mpisgd.compress.compressor import BucketLayout
from mpisgd.compress.quantizing_reducer import QuantizingReducer
from mpisgd.compress.residual import Waiting, memory_of
from mpisgd.compress.wide_compressor import WideCompressor
from mpisgd.methods.coding import Coding
from mpisgd.methods.natural import paper
from mpisgd.methods.paper_kit import Paper

__all__ = ["Natural", "PowersOfTwo"]

CHUNK_NUMEL = 2**16  # stays in cache from one pass to the next


@dataclass(frozen=True)
class Natural(WideCompressor):
    """Rounds each element to one of the two adjacent powers of two, at random and without bias.

    For 2^a <= |t| <= 2^(a + 1)

        C(t) = sign(t) 2^a                     with probability 2 - |t| / 2^a
             = sign(t) 2^(a + 1)               else
        g    = mean of C(g_i) over the ranks   (or the sum, with op=SUM)

    The expectation of C(t) is t, and its variance at most t^2 / 8. Sign and exponent are sent: 9 bits of a
    float32, 12 of a float64.

    Attributes:
        error_feedback: whether the rounding error is added to the next gradient.
        seed: seed of the random numbers, which differ by rank and step.

    Raises:
        InvalidArgument: at construction.

    Cost: sends (size - 1) times 9 or 12 bits of each element; every rank decodes what all have sent.
    """

    error_feedback: bool = False
    seed: int = 0

    @classmethod
    def examples(cls) -> Sequence["Natural"]:
        """See `Compressor`."""
        return (cls(), cls(error_feedback=True, seed=1))

    def __post_init__(self) -> None:
        check_flag("Natural", "error_feedback", self.error_feedback)
        check_seed("Natural", self.seed)

    def codec(self, layout: BucketLayout) -> "PowersOfTwo":
        """Return the codec of a bucket; the variance of its codes is at most |x|^2 / 8."""
        return PowersOfTwo(layout)

    def wide_reducer(self, layout: BucketLayout) -> QuantizingReducer:
        """Return the reducer, which sends the codes of a bucket."""
        state = Waiting()
        memory = memory_of(layout, self.error_feedback, state)
        return QuantizingReducer(self.codec(layout), layout.numel, self.seed, memory, state)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`. Signs and exponents go to all ranks."""
        return Coding(element_s=30e-9, copies=0.0)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.Natural(feedback=self.error_feedback)


class PowersOfTwo:
    """A codec of signs and exponents, as IEEE 754 has them: the low 8 bits of the exponent, then the rest.

        float32   s eeeeeeee mmm...            s | eeeeeeee            1 + 8 bits
        float64   s eee eeeeeeee mmm...        s eee | eeeeeeee        4 + 8 bits

    A random number below 1 is added to the mantissa, which is then dropped: the exponent grows by one with
    the probability that the mantissa is. That holds for subnormal numbers, too. What is not finite becomes
    infinite.
    """

    def __init__(self, layout: BucketLayout) -> None:
        is_single = layout.dtype is torch.float32
        self._layout = layout
        self._int = torch.int32 if is_single else torch.int64
        self._mantissa_bits = 23 if is_single else 52
        self._head_bits = 1 if is_single else 4  # the sign, and the exponent's bits beyond 8
        self._head_bytes = packed_size(layout.numel, self._head_bits)
        self.nbytes = self._head_bytes + layout.numel

    def compress(self, flat: Tensor, random: np.random.Generator) -> Tensor:
        """Return the heads, packed, and the low bits of the exponents."""
        message = torch.empty(self.nbytes, dtype=torch.uint8, device=flat.device)
        for values, head, low in self._chunks(flat, message):
            mantissas = self._draw(values, random).mul_(values.isfinite())
            exponents = mantissas.add_(values.view(self._int)).bitwise_right_shift_(self._mantissa_bits)
            low.copy_(exponents & 0xFF)
            heads = exponents.bitwise_right_shift_(8).bitwise_and_(2**self._head_bits - 1)
            pack(heads.to(torch.uint8), self._head_bits, out=head)
        return message

    def _chunks(self, flat: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield elements with their heads and the low bits of their exponents, of whole bytes each."""
        heads = torch.split(message[: self._head_bytes], CHUNK_NUMEL * self._head_bits // 8)
        lows = torch.split(message[self._head_bytes :], CHUNK_NUMEL)
        return zip(torch.split(flat, CHUNK_NUMEL), heads, lows, strict=True)

    def _draw(self, values: Tensor, random: np.random.Generator) -> Tensor:
        """Return random mantissas."""
        kind = np.uint32 if self._int is torch.int32 else np.uint64
        drawn = random.integers(0, 2 ** (8 * self._int.itemsize), values.numel(), dtype=kind)
        mantissas = torch.from_numpy(drawn.view(f"i{self._int.itemsize}")).to(values.device)
        return mantissas.bitwise_and_(2**self._mantissa_bits - 1)

    def decompress(self, message: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add the powers of two, or subtract them."""
        for place, packed, low in self._chunks(out, message):
            heads = unpack(packed, self._head_bits, low.numel())
            exponents = heads.to(self._int).bitwise_left_shift_(8).bitwise_or_(low)
            powers = exponents.bitwise_left_shift_(self._mantissa_bits).view(self._layout.dtype)
            place.add_(powers, alpha=sign)
