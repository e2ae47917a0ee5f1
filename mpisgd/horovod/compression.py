"""The form in which gradients are sent: `Compression.none`, `.fp16` and, beyond Horovod's, `.bf16`."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Makes a tensor smaller before it travels; one's own derive from it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor that is sent, and the context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return a received tensor in the form that it had before `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """No compression."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return `tensor`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor`."""
        return tensor


class _CastCompressor(Compressor):
    """Travels in another floating dtype; the ranks' values are added in float32 and rounded once."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return `tensor` in the smaller dtype, if it is a floating one."""
        return (tensor.to(cls.dtype) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor` in the dtype it had."""
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """float16: 3 decimal digits, overflows beyond 65504."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """bfloat16: 2 decimal digits, the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
