"""What `RandomK` takes. A sum of the elements that all ranks have drawn alike, by indices of 8 bytes."""

from mpisgd.methods.coding import Coding
from mpisgd.methods.random_k.random_k import RandomK

__all__ = ["coding"]


def coding(method: RandomK) -> Coding:
    """Return what it does with a bucket."""
    return Coding(collectives=("all_reduce",), element_s=10e-9, copies=3 * method.ratio)
