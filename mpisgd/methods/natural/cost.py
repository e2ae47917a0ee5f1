"""What `Natural` takes. Signs and exponents go to all ranks."""

from mpisgd.methods.coding import Coding
from mpisgd.methods.natural.natural import Natural

__all__ = ["coding"]


def coding(method: Natural) -> Coding:
    """Return what it does with a bucket."""
    return Coding(element_s=30e-9, copies=0.0)
