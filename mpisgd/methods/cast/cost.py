"""What casts take. A sum of narrower floats."""

from mpisgd.methods.cast.cast import Cast
from mpisgd.methods.coding import Coding

__all__ = ["coding"]


def coding(method: Cast) -> Coding:
    """Return what it does with a bucket."""
    return Coding(collectives=("all_reduce",), element_s=1e-9, copies=0.5)
