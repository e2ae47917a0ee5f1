"""Threshold: the elements of a magnitude of at least tau are sent, and the rest is kept.

Strom 2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", which sends tau and -tau
instead of the elements; Dryden et al. 2016, "Communication Quantization for Data-Parallel Training of Deep
Neural Networks".

    C(v) = v where |v| >= tau, else 0
"""

from dataclasses import dataclass

from mpisgd.methods.compression_kit import Compressor
from mpisgd.methods.paper_kit import Draws, Vec, World

__all__ = ["Threshold"]


@dataclass(frozen=True, kw_only=True)
class Threshold(Compressor):
    """Has the residual of error feedback."""

    rounds = False

    tau: float

    def C(self, v: Vec, w: World, draw: Draws) -> Vec:
        """See `Compressor`."""
        return v.each(lambda tensor: tensor.where(tensor.abs() >= self.tau, 0.0))
