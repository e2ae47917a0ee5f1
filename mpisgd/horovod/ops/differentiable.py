"""What the functions that have a gradient have in common."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.horovod.arguments import check_compression
from mpisgd.horovod.compression import Compressor

__all__ = ["OfOneTensor", "compressed"]


class OfOneTensor:
    """A function of one tensor: that of several, `grouped`, called with one."""

    grouped: type[torch.autograd.Function]

    @classmethod
    def apply(cls, tensor: Tensor, *options: Any) -> Tensor:
        """Return the result for `tensor`; `options` as of the asynchronous function."""
        result: Tensor = cls.grouped.apply(*options, tensor)[0]  # type: ignore[no-untyped-call]
        return result


def compressed(
    function: type[torch.autograd.Function],
    kind: str,
    tensors: Sequence[Tensor],
    compression: type[Compressor],
    options: Sequence[Any],
) -> list[Tensor]:
    """Call a function with compressed tensors, and return its results decompressed."""
    check_compression(kind, compression)
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = function.apply(*options, *[smaller for smaller, _ in pairs])  # type: ignore[no-untyped-call]
    return [compression.decompress(r, ctx) for r, (_, ctx) in zip(results, pairs, strict=True)]
