"""`SparseSum`: the sum of a few elements of each rank, by whichever of three routes sends least.

    gather   everyone gets everyone's elements, and adds them up
    owners   each rank owns a range of the indices; it gets what the others have there, adds it up, and
             everyone gets the sums, as elements or, where these would be more, as the whole range
    dense    the vector with zeros in between is summed as any other

With n elements of w bytes, of which each of N ranks has k, indices of i bytes and u different indices in all,
a rank sends on average

    gather   (N - 1) k (w + i)
    owners   (N - 1) / N (k (w + i) + min(u (w + i), n w))
    dense    (N - 1) / N 2 n w

The choice takes numbers that all ranks know: u is estimated as if the ranks chose their elements
independently of each other. All routes add up in rank order, so that all ranks get the same bits.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpisgd.compress.exchange import all_to_all, gather, gather_numbers, gather_ragged
from mpisgd.compress.sum_reducer import SumReducer
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.transport.messages.link import even_ranges
from mpisgd.transport.torch_reduction import divide

__all__ = ["SparseSum"]

COUNT_BYTES = 8
MAX_INT32 = 2**31 - 1


class SparseSum:
    """Sums elements of vectors of one size.

    Args:
        numel: of the vectors.
        dtype: of the values.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._numel = numel
        self._dtype = dtype
        self._index = torch.int32 if numel <= MAX_INT32 else torch.int64
        self._pair = dtype.itemsize + self._index.itemsize  # bytes of an element that travels with its index

    # -- the choice ---------------------------------------------------------------------------------

    def costs(self, total: int, size: int) -> dict[str, int]:
        """Return how many bytes each route sends from each of `size` ranks, that have `total` elements."""
        mean, full = total / size, self._numel * self._dtype.itemsize
        union = self._numel * (1 - (1 - mean / self._numel) ** size) if self._numel else 0
        returned = min(union * self._pair, full)
        counts = (size - 1) * (size + 1) * COUNT_BYTES
        return {
            "dense": SumReducer(full).bytes_on_the_wire(size),
            "gather": round((size - 1) * mean * self._pair),
            "owners": round((size - 1) / size * (mean * self._pair + returned)) + counts,
        }

    def route(self, total: int, size: int) -> str:
        """Return the route that sends least; of equals the simplest."""
        costs = self.costs(total, size)
        return min(costs, key=costs.__getitem__)

    # -- the routes ---------------------------------------------------------------------------------

    def reduce(
        self, out: Tensor, indices: Tensor, values: Tensor, counts: Sequence[int], group: Group, op: ReduceOp
    ) -> int:
        """Combine what the ranks have; return how many bytes this rank has sent.

        Args:
            out: [numel]; overwritten.
            indices: [k] of this rank's elements, each once.
            values: [k] of them, in memory of their own; changed.
            counts: k of every rank, known to all.
            group: the ranks.
            op: SUM, or AVG: divided by the number of ranks.
        """
        route = self.route(sum(counts), group.size)
        routes: dict[str, Callable[..., int]] = {
            "gather": self._by_gather,
            "owners": self._by_owners,
            "dense": self._as_dense,
        }
        if op is ReduceOp.AVG and route != "dense":
            divide(values, group.size)  # before they are many
        return routes[route](out, indices, values, counts, group, op)

    def _as_dense(
        self, out: Tensor, indices: Tensor, values: Tensor, counts: Sequence[int], group: Group, op: ReduceOp
    ) -> int:
        out.zero_().index_copy_(0, indices, values)
        reducer = SumReducer(out.nbytes)
        reducer.reduce(out, group, op)
        return reducer.bytes_on_the_wire(group.size)

    def _by_gather(
        self, out: Tensor, indices: Tensor, values: Tensor, counts: Sequence[int], group: Group, op: ReduceOp
    ) -> int:
        mine = self.message(indices, values)
        if min(counts) == max(counts):
            messages: Sequence[Tensor] = list(gather(mine, group))
        else:
            messages = gather_ragged(mine, [count * self._pair for count in counts], group)
        out.zero_()
        for message in messages:
            out.index_add_(0, *self.elements(message))
        return (group.size - 1) * mine.nbytes

    def _by_owners(
        self, out: Tensor, indices: Tensor, values: Tensor, counts: Sequence[int], group: Group, op: ReduceOp
    ) -> int:
        ranges = even_ranges(self._numel, group.size)
        pieces = self._cut(indices, values, [start for start, _ in ranges])
        lengths = gather_numbers([piece.nbytes for piece in pieces], group)
        total, touched = self._sum_of_range(all_to_all(pieces, lengths, group), *ranges[group.rank])
        sent = sum(lengths[group.rank]) - lengths[group.rank][group.rank]
        returned = self._return(out, total, touched, ranges, group)
        return sent + returned + (group.size - 1) * (group.size + 1) * COUNT_BYTES

    def _cut(self, indices: Tensor, values: Tensor, starts: Sequence[int]) -> list[Tensor]:
        """Return the elements as messages to the owners of the ranges that begin at `starts`."""
        indices, order = indices.sort()
        edges = torch.searchsorted(indices, torch.tensor(starts, device=indices.device)).tolist()
        values, edges = values[order], [*edges, len(indices)]
        return [
            self.message(indices[start:stop], values[start:stop]) for start, stop in itertools.pairwise(edges)
        ]

    def _sum_of_range(self, messages: Sequence[Tensor], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the sums of the elements from `start` to `stop`, and whether each was in a message."""
        device = messages[0].device
        total = torch.zeros(stop - start, dtype=self._dtype, device=device)
        touched = torch.zeros(stop - start, dtype=torch.bool, device=device)
        for message in messages:
            indices, values = self.elements(message)
            indices -= start
            total.index_add_(0, indices, values)
            touched.index_fill_(0, indices.long(), True)
        return total, touched

    def _return(
        self,
        out: Tensor,
        total: Tensor,
        touched: Tensor,
        ranges: Sequence[tuple[int, int]],
        group: Group,
    ) -> int:
        """Bring the sums of every range to all ranks; return how many bytes this rank has sent."""
        indices = touched.nonzero().view(-1)
        counts = [count for (count,) in gather_numbers([indices.numel()], group)]
        if sum(counts) * self._pair < out.nbytes:
            mine = self.message(indices + ranges[group.rank][0], total[indices])
            messages = gather_ragged(mine, [count * self._pair for count in counts], group)
            out.zero_()
            for message in messages:
                places, values = self.elements(message)
                out.index_copy_(0, places.long(), values)
            return (group.size - 1) * mine.nbytes
        torch.cat(gather_ragged(total, [stop - start for start, stop in ranges], group), out=out)
        return (group.size - 1) * total.nbytes

    # -- messages -----------------------------------------------------------------------------------

    def message_bytes(self, count: int) -> int:
        """Return how many bytes a message of so many elements has."""
        return count * self._pair

    def message(self, indices: Tensor, values: Tensor) -> Tensor:
        """Return elements as bytes: the values, then the indices."""
        return torch.cat([values.view(torch.uint8), indices.to(self._index).view(torch.uint8)])

    def elements(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices and values of a message."""
        edge = message.numel() // self._pair * self._dtype.itemsize
        # A copy: in the middle of a message neither begins where its dtype must.
        return message[edge:].clone().view(self._index), message[:edge].clone().view(self._dtype)
