"""What `PowerSGD` takes. A sum of all P, then one of all Q, which needs the first."""

from mpisgd.methods.coding import Coding
from mpisgd.methods.power_sgd.power_sgd import PowerSGD

__all__ = ["coding"]


def coding(method: PowerSGD) -> Coding:
    """Return what it does with a bucket."""
    return Coding(collectives=("all_reduce", "all_reduce"), element_s=10e-9, copies=0.0)
