"""What `DeepGradient` takes. It sends as `TopK`."""

from mpisgd.methods.coding import Coding
from mpisgd.methods.deep_gradient.deep_gradient import DeepGradient

__all__ = ["coding"]


def coding(method: DeepGradient) -> Coding:
    """Return what it does with a bucket."""
    return Coding(element_s=20e-9, copies=0.0, of_largest=1.25)
