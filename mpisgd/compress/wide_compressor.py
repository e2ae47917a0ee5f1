"""`WideCompressor`: computes in float32 or float64, also where gradients are 16-bit floats.

A residual in 16 bits would lose what it is there to keep. So a bucket of float16 or bfloat16 becomes float32
before anything else, what is kept is float32, and what arrives is rounded once.
"""

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from mpisgd.compress.compressor import BucketLayout, BucketReducer, Compressor
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp

__all__ = ["WideCompressor", "WideningReducer"]

WIDE_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class WideCompressor(Compressor):
    """Compresses float32, float64, and 16-bit floats as float32; other dtypes are summed as they are."""

    def reducer(self, layout: BucketLayout) -> BucketReducer:
        """Return the reducer of a bucket; not collective."""
        if layout.dtype in WIDE_DTYPES:
            return self.wide_reducer(layout)
        return WideningReducer(self.wide_reducer(layout._replace(dtype=torch.float32)))

    @abc.abstractmethod
    def wide_reducer(self, layout: BucketLayout) -> BucketReducer:
        """Return the reducer of a bucket of float32 or float64."""


class WideningReducer(BucketReducer):
    """Gives another reducer the bucket as float32.

    Args:
        inner: for a bucket of the same shapes and float32.
    """

    def __init__(self, inner: BucketReducer) -> None:
        self._inner, self.state = inner, inner.state

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Reduce the widened bucket, and round what comes out; see `BucketReducer.reduce`."""
        wide = bucket.float()
        self._inner.reduce(wide, group, op)
        bucket.copy_(wide)

    def bytes_on_the_wire(self, size: int) -> int:
        """Return the bytes that the other reducer sends."""
        return self._inner.bytes_on_the_wire(size)

    def kept_apart(self, start: int, stop: int) -> dict[str, Tensor]:
        """As the other reducer."""
        return self._inner.kept_apart(start, stop)
