"""What op=Adasum takes. The gradients of all ranks go to all ranks, which combine them."""

from mpisgd.methods.adasum.adasum import AdaptiveSum
from mpisgd.methods.coding import Coding

__all__ = ["coding"]


def coding(method: AdaptiveSum) -> Coding:
    """Return what it does with a bucket."""
    return Coding(element_s=5e-9, copies=0.0)
