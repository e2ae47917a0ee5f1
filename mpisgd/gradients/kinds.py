"""What kind of gradient a parameter has: one bit each, so that the kinds of several ranks can be joined."""

from torch import Tensor

__all__ = ["ALL_DENSE", "DENSE", "MISSING", "NONFINITE", "SPARSE", "kind_of"]

MISSING, DENSE, SPARSE = 0, 1, 2
ALL_DENSE = bytes([DENSE])  # to strip from many
NONFINITE = 4  # besides its kind, where somebody has looked


def kind_of(grad: Tensor | None) -> int:
    """Return MISSING, DENSE or SPARSE."""
    if grad is None:
        return MISSING
    return SPARSE if grad.is_sparse else DENSE
