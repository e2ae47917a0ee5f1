"""`Shares`: which parts of the gradients each rank gets, where they are divided bucket by bucket.

With two ranks, a bucket of w and b, which lie there from the last to the first, and cache lines as signs:

    bucket    | b.. w....... |
    rank 0      b.. w.
    rank 1            ......      of lines each rank has as many as others; each parameter begins with one
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.gradients.options import DEFAULT_BUCKET_CAP_BYTES
from mpisgd.methods.paper_kit import Slice, Vec
from mpisgd.tools.verification.draws import Buckets

__all__ = ["Place", "Shares"]

LINE_BYTES = 64


class Place(NamedTuple):
    """Where a parameter lies beside those that travel with it.

    Attributes:
        memory: what was given to the optimizer at once; what came later is divided by itself.
        group: of the optimizer.
    """

    memory: int = 0
    group: int = 0


@dataclass(frozen=True)
class Shares:
    """`Buckets` of the parameters that travel: for each rank its share of all buckets.

    Attributes:
        size: how many ranks there are.
        cap_bytes: most bytes of a bucket.
        places: by name, where it is not the first of both.
    """

    size: int
    cap_bytes: int = DEFAULT_BUCKET_CAP_BYTES
    places: Mapping[str, Place] = field(default_factory=dict)

    def __call__(self, x: Vec) -> Buckets:
        """Return the pieces in the share of each rank."""
        shares: list[list[Slice]] = [[] for _ in range(self.size)]
        for bucket in self._buckets(x):
            place_of = {name: self.places.get(name, Place()) for name in bucket}
            for memory in {place.memory for place in place_of.values()}:
                beside = [name for name in bucket if place_of[name].memory == memory]
                beside.sort(key=lambda name: place_of[name].group)
                for share, pieces in zip(shares, self._divided([(n, x[n]) for n in beside]), strict=True):
                    share += pieces
        return tuple(map(tuple, shares))

    def _buckets(self, x: Vec) -> Iterator[list[str]]:
        """Yield the names in each bucket: of one dtype, from the last to the first."""
        for dtype in {tensor.dtype for tensor in x.values()}:
            bucket, num_bytes = list[str](), 0
            for name, tensor in reversed(x.items()):
                if tensor.dtype != dtype:
                    continue
                if tensor.nbytes >= ALONE_BYTES:
                    yield [name]
                    continue
                if bucket and num_bytes + tensor.nbytes > self.cap_bytes:
                    yield bucket
                    bucket, num_bytes = [], 0
                bucket.append(name)
                num_bytes += _lines(tensor) * LINE_BYTES
            if bucket:
                yield bucket

    def _divided(self, bucket: Sequence[tuple[str, Tensor]]) -> Iterator[list[Slice]]:
        """Yield the pieces of each rank of what lies side by side."""
        ends = [0, *itertools.accumulate(_lines(tensor) for _, tensor in bucket)]
        for rank in range(self.size):
            first, last = (ends[-1] * each // self.size for each in (rank, rank + 1))
            pieces = []
            for (name, tensor), start in zip(bucket, ends, strict=False):
                each, numel = LINE_BYTES // tensor.element_size(), tensor.numel()
                begin, end = (min(numel, max(0, cut - start) * each) for cut in (first, last))
                if begin < end:
                    pieces.append(Slice(name, begin, end))
            yield pieces


def _lines(tensor: Tensor) -> int:
    return -(-tensor.nbytes // LINE_BYTES)
