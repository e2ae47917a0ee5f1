"""Some elements travel, as values and indices: as a codec, and as a reducer that keeps the rest."""

import abc
from collections.abc import Callable

import numpy as np
from torch import Tensor

from mpisgd.compress.compressor import BucketLayout, BucketReducer
from mpisgd.compress.exchange import gather_numbers
from mpisgd.compress.residual import ErrorMemory, Waiting
from mpisgd.compress.sparse_sum import COUNT_BYTES, SparseSum
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp

__all__ = ["SparseCodec", "SparseReducer"]

Select = Callable[[Tensor, np.random.Generator], Tensor]


class SparseReducer(BucketReducer):
    """Adds what the memory has, selects elements, sums these over the ranks.

    Args:
        layout: of the bucket.
        memory: of what is not selected.
        state: what is kept.
    """

    state: Waiting

    def __init__(self, layout: BucketLayout, memory: ErrorMemory, state: Waiting) -> None:
        self.numels = [shape.numel() for shape in layout.shapes]
        self.state, self.memory = state, memory
        self._sum = SparseSum(layout.numel, layout.dtype)
        self._sent: tuple[int, int] | None = None  # the number of ranks, and bytes

    @abc.abstractmethod
    def select(self, meant: Tensor) -> Tensor:
        """Return the indices [k] of what this rank sends in this step, each once."""

    @abc.abstractmethod
    def count(self) -> int | None:
        """Return how many elements every rank sends in this step; None where that depends on the data."""

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Replace the bucket by the combination of what was selected; see `BucketReducer.reduce`."""
        count = self.count()
        meant = self.memory.add(bucket)
        indices = self.select(meant)
        values = meant.index_select(0, indices)
        self.memory.take_at(indices)
        counts, told = [count or 0] * group.size, 0
        if count is None:
            counts = [number for (number,) in gather_numbers([indices.numel()], group)]
            told = (group.size - 1) * COUNT_BYTES
        sent = self._sum.reduce(bucket, indices, values, counts, group, op)
        self._sent = group.size, told + sent
        self.state.steps += 1

    def bytes_on_the_wire(self, size: int) -> int:
        """Return the bytes that the last `reduce` has sent; before, those that the next one will send.

        With k elements of w bytes and their indices of 4: (size - 1) k (w + 4), or less where another route
        is shorter; see `SparseSum`. 0 where it depends on the data and there are none.
        """
        if self._sent is not None and self._sent[0] == size:
            return self._sent[1]
        count = self.count()
        if count is None:
            return 0
        total = count * size
        return self._sum.costs(total, size)[self._sum.route(total, size)]


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
