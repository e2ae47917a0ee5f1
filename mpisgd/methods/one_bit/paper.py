"""EF-signSGD: signs times the mean magnitude of each parameter are sent, and the rest is kept.

Karimireddy, Rebjock, Stich and Jaggi 2019, "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", algorithm 1, with the mean over the ranks.

    C(v) = |v|_1 / d sign(v)      of a parameter's d elements; the sign of 0 is 1
"""

from dataclasses import dataclass

from mpisgd.methods.compression_kit import Compressor, signs
from mpisgd.methods.paper_kit import Draws, Vec, World

__all__ = ["OneBit"]


@dataclass(frozen=True, kw_only=True)
class OneBit(Compressor):
    """Has the residual of error feedback."""

    depends_on = ("two_step",)

    def C(self, v: Vec, w: World, draw: Draws) -> Vec:
        """See `Compressor`."""
        return v.each(signs)
