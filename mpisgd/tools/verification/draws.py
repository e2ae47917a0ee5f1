"""`BucketDraws`: the random numbers that mpisgd's compressors draw, which papers leave open.

Of each bucket, a rank draws from the generator SFC64 seeded with the compressor's seed, the reduction and the
bucket's elements; and with its place in the group, where ranks draw different numbers.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.methods.paper_kit import Slice

__all__ = ["BucketDraws", "Buckets"]

Buckets = tuple[tuple[Slice, ...], ...]
MANTISSA_BITS = {torch.float32: 23, torch.float64: 52}


class BucketDraws:
    """See `mpisgd.methods.paper_kit.Draws`.

    Args:
        layout: the buckets.
        k: the number of the reduction, from 0.
        place: of the rank in its group; None: all ranks draw the same numbers.
        seed: of the compressor.
        from_mantissas: whether uniform numbers are the low bits of random words, as for powers of two.
    """

    def __init__(
        self,
        layout: Buckets,
        k: int,
        place: int | None,
        seed: int = 0,
        *,
        from_mantissas: bool = False,
    ) -> None:
        self._layout, self._k, self._seed = layout, k, seed
        self._place = [] if place is None else [place]
        self._from_mantissas = from_mantissas

    def uniform(self, name: str, like: Tensor) -> Tensor:
        """See `Draws`."""
        bucket = next(bucket for bucket in self._layout if any(piece.name == name for piece in bucket))
        numels = [piece.numel for piece in bucket]
        begin = sum(numels[: [piece.name for piece in bucket].index(name)])
        drawn = self._uniform(sum(numels), like.dtype)
        return torch.from_numpy(drawn[begin : begin + like.numel()]).to(like.dtype).view(like.shape)

    def _uniform(self, numel: int, dtype: torch.dtype) -> Any:
        random = self._generator(self._k, numel, *self._place)
        if not self._from_mantissas:
            return random.random(numel, dtype=np.float32 if dtype is torch.float32 else np.float64)
        bits = MANTISSA_BITS[dtype]
        words = random.integers(0, 2 ** (8 * dtype.itemsize), numel, dtype=f"u{dtype.itemsize}")
        return words % 2**bits / 2.0**bits

    def normal(self, name: str, like: Tensor, columns: int) -> Tensor:
        """See `Draws`."""
        drawn = self._generator(0, like.numel()).standard_normal((like.shape[1], columns))
        return torch.from_numpy(drawn).to(like.dtype)

    def choice(self, numel: int, count: int) -> Tensor:
        """See `Draws`."""
        random = self._generator(self._k, numel, *self._place)
        return torch.from_numpy(random.choice(numel, count, replace=False, shuffle=False))

    def _generator(self, *entropy: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self._seed % 2**64, *entropy]))
