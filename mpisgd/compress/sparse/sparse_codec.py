"""`SparseCodec`: some elements of a vector, as values and indices."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from mpisgd.compress.compressor import BucketLayout
from mpisgd.compress.sparse.sparse_sum import SparseSum

__all__ = ["SparseCodec"]

Select = Callable[[Tensor, np.random.Generator], Tensor]


class SparseCodec:
    """A codec of the elements that a function selects.

    Args:
        layout: of the bucket.
        select: returns the indices [count] of a vector [n], each once.
        count: how many there are.
    """

    def __init__(self, layout: BucketLayout, select: Select, count: int) -> None:
        self._select = select
        self._sum = SparseSum(layout.numel, layout.dtype)
        self.nbytes = self._sum.message_bytes(count)

    def compress(self, flat: Tensor, random: np.random.Generator) -> Tensor:
        """Return the values and the indices."""
        indices = self._select(flat, random)
        return self._sum.message(indices, flat.index_select(0, indices))

    def decompress(self, message: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add the elements, or subtract them."""
        indices, values = self._sum.elements(message)
        out.index_add_(0, indices, values, alpha=sign)
