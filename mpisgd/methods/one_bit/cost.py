"""What `OneBit` takes. Signs and a magnitude per parameter go to all ranks."""

from mpisgd.methods.coding import Coding
from mpisgd.methods.one_bit.one_bit import OneBit
from mpisgd.methods.two_step import cost as two_step

__all__ = ["coding"]


def coding(method: OneBit) -> Coding:
    """Return what it does with a bucket."""
    if method.two_step:
        return two_step.CODING
    return Coding(element_s=5e-9, copies=2.0)
