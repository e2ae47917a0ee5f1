"""Top-k: of each parameter the k elements of largest magnitude are sent, and the rest is kept.

Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent"; Stich, Cordonnier and Jaggi
2018, "Sparsified SGD with Memory". The memory is that of `compression_kit.compressed`, in units of
the gradient: Stich has the learning rate in it.

    C(v) = v where |v| is among the k largest of a parameter's n elements, else 0;   k = max(1, ratio n)
"""

from dataclasses import dataclass

from mpisgd.methods.compression_kit import Compressor, largest
from mpisgd.methods.paper_kit import Draws, Vec, World

__all__ = ["TopK"]


@dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """Has the residual of error feedback."""

    rounds, chooses = False, True

    ratio: float

    def C(self, v: Vec, w: World, draw: Draws) -> Vec:
        """See `Compressor`."""
        return v.each(lambda tensor: largest(tensor, self.ratio))
