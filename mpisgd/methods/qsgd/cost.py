"""What `QSGD` takes. Codes and norms go to all ranks."""

from mpisgd.methods.coding import Coding
from mpisgd.methods.qsgd.qsgd import QSGD

__all__ = ["coding"]


def coding(method: QSGD) -> Coding:
    """Return what it does with a bucket."""
    return Coding(element_s=30e-9, copies=0.25)
