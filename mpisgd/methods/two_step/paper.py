"""The 1-bit average: ranks send signs to the owners of chunks, and these send the signs of the mean to all.

Tang et al. 2021, "1-bit Adam", section 5 and algorithm 1. n ranks; v_i is what rank i has.

    s_i = C(v_i + e_i);    e_i <- v_i + e_i - s_i     the worker's error
    y   = mean of s_i + d;   d <- y - C(y)            the server's, each rank's for the chunk that it owns
    v  <- C(y)
    C(v) = |v|_1 / k sign(v)                          of the k elements of a parameter in a chunk
"""

from torch import Tensor

from mpisgd.methods.compression_kit import TwoStepCompressor, signs

__all__ = ["TwoStep"]


class TwoStep(TwoStepCompressor):
    """The two steps are those of the kit."""

    def of_piece(self, v: Tensor) -> Tensor:
        return signs(v)
