"""Top-k of chunks, in a few bits: the compressor of SparseLoCo, for anything that travels.

Sarfi, Therien, Lidin and Belilovsky 2025, "Communication Efficient LLM Pre-training with SparseLoCo",
algorithm 1. C is Q of the largest elements of each chunk of consecutive elements of a parameter.

    m_i = g_i + beta e_i;   s_i = C(m_i);   e_i = m_i - s_i

Q is of this package: `ChunkTopK` says how it differs from the authors'.
"""

from dataclasses import dataclass

from mpisgd.methods.compression_kit import Compressor, of_chunks
from mpisgd.methods.paper_kit import Draws, Vec, World

__all__ = ["ChunkTopK"]


@dataclass(frozen=True, kw_only=True)
class ChunkTopK(Compressor):
    """Has the residual of error feedback; a code has a sign and one of L + 1 magnitudes."""

    of_memory = True

    keep: int
    chunk: int
    L: int

    def C(self, v: Vec, w: World, draw: Draws) -> Vec:
        """See `Compressor`."""
        return v.each(lambda tensor: of_chunks(tensor, self.keep, self.chunk, self.L))
