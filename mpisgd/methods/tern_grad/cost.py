"""What `TernGrad` takes. Codes and a scale per parameter go to all ranks."""

from mpisgd.methods.coding import Coding
from mpisgd.methods.tern_grad.tern_grad import TernGrad

__all__ = ["coding"]


def coding(method: TernGrad) -> Coding:
    """Return what it does with a bucket."""
    return Coding(element_s=30e-9, copies=0.25 if method.clip_sigmas is None else 1.25)
