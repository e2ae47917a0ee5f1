"""Block quantization in two steps: ranks send codes to owners of chunks, and these send those of the mean.

Wang et al. 2023, "ZeRO++", sections 3.1 and 3.3 (qgZ): a sum of codes would be no code, so each owner adds up
what they stand for, and what it sends is quantized again. n ranks. Without error feedback e and d stay 0.

    s_i = Q(g_i + e_i);    e_i <- g_i + e_i - s_i     what a rank leaves out
    y   = mean of s_i + d;   d <- y - Q(y)            what owners leave out, each rank's of the chunk it owns
    g  <- Q(y)
    Q(v) = s round(v / s),  s = max |v| / L           of each block of B elements of a parameter in a chunk
"""

from dataclasses import dataclass

from torch import Tensor

from mpisgd.methods.compression_kit import TwoStepCompressor, in_blocks

__all__ = ["BlockQuantized"]


@dataclass(frozen=True, kw_only=True)
class BlockQuantized(TwoStepCompressor):
    """The two steps are those of the kit."""

    L: int
    B: int
    feedback: bool = False

    def of_piece(self, v: Tensor) -> Tensor:
        return in_blocks(v, self.L, self.B)
