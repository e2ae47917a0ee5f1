"""What `Threshold` takes. It sends as `TopK`, as many elements as pass."""

from mpisgd.methods.coding import Coding
from mpisgd.methods.threshold.threshold import Threshold

__all__ = ["coding"]


def coding(method: Threshold) -> Coding:
    """Return what it does with a bucket."""
    return Coding(element_s=5e-9, by_data=True)
