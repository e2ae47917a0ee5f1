"""Whether a bucket has infinities or NaNs: what a compressor leaves out must not hide an overflow."""

from torch import Tensor

__all__ = ["is_finite"]


def is_finite(flat: Tensor) -> bool:
    """Return whether all elements are finite; one pass, unless their sum overflows."""
    return bool(flat.sum().isfinite()) or bool(flat.isfinite().all())
