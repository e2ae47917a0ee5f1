"""Random-k: of each bucket k random elements are sent, the same ones by all ranks.

Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with Memory"; without feedback Wangni, Wang,
Liu and Zhang 2018, "Gradient Sparsification for Communication-Efficient Distributed Optimization", unbiased:

    C(v) = v at k of the n elements of a bucket, else 0;   k = max(1, ratio n)
    Q(v) = n / k C(v)                                      without feedback
"""

from dataclasses import dataclass

import torch

from mpisgd.methods.compression_kit import Compressor
from mpisgd.methods.paper_kit import Draws, Vec, World

__all__ = ["RandomK"]


@dataclass(frozen=True, kw_only=True)
class RandomK(Compressor):
    """Has the residual of error feedback."""

    of_buckets = of_memory = counts = True

    ratio: float

    def drawn(self, k: int, place: int, w: World) -> Draws:
        """Return the random numbers of all ranks."""
        return w.draw(k, None)

    def C(self, v: Vec, w: World, draw: Draws) -> Vec:
        """See `Compressor`."""
        sent = v.each(lambda tensor: torch.zeros(tensor.numel(), dtype=tensor.dtype))
        for bucket in w.layout:
            n = sum(piece.numel for piece in bucket)
            k = min(n, max(1, round(self.ratio * n)))
            chosen = torch.zeros(n, dtype=torch.bool).index_fill(0, draw.choice(n, k), True)
            parts = torch.split(chosen, [piece.numel for piece in bucket])
            for piece, mask in zip(bucket, parts, strict=True):
                if piece.name in v:
                    sent[piece.name] = piece.of(v) * mask * (1.0 if self.feedback or not k else n / k)
        return Vec({name: tensor.view(v[name].shape) for name, tensor in sent.items()})
