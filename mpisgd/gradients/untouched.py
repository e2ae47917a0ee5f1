"""`Untouched`: what a reducer keeps of parameters of which no rank has a gradient stays as it was.

Such a parameter keeps `grad = None`, and nothing that arrives for it is used. Its elements lie in the bucket
nevertheless, as zeros: with a residual something of it would be sent, and be gone; a velocity would go on
without an update; a factor would turn to what was left out. So all that is declared as the reducer's state is
put back as it was before, on every rank, as if the bucket had been one without these parameters.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from mpisgd.gradients.compression_state import ReducedBucket
from mpisgd.gradients.kinds import DENSE

__all__ = ["Untouched"]


class Untouched:
    """Remembers the state of some parameters of a bucket, which is about to be reduced.

    Args:
        slot: the bucket.
        kinds: of its gradients, on any rank.
    """

    def __init__(self, slot: ReducedBucket, kinds: bytes) -> None:
        edges = itertools.pairwise([*slot.bucket.offsets, slot.bucket.numel])
        self._slot = slot
        self._absent = [
            (place, start, stop)
            for place, (kind, (start, stop)) in enumerate(zip(kinds, edges, strict=True))
            if not kind & DENSE
        ]
        self._kept = {where: memory.clone() for where, memory in self._memory()}

    def put_back(self) -> None:
        """Make it what it was; what there was none of begins at zero."""
        for where, memory in self._memory():
            if where in self._kept:
                memory.copy_(self._kept[where])
            else:
                memory.zero_()

    def _memory(self) -> Iterator[tuple[tuple[str, int], Tensor]]:
        """Yield the memory of what is kept of these parameters now, by field and place."""
        reducer, bucket = self._slot.reducer, self._slot.bucket
        state = reducer.state_dict()
        for place, start, stop in self._absent:
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == (bucket.numel,):
                    yield (name, place), value[start:stop]
                elif isinstance(value, list) and isinstance(entry := value[place], torch.Tensor):
                    yield (name, place), entry
            for name, value in reducer.kept_apart(start, stop).items():
                yield (name, place), value
