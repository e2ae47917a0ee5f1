"""Compression by casting: half the bytes (or a quarter) on the wire, the sum still in float32.

Each element's owner adds the halves of all ranks in float32 and rounds once, and takes its own rounded
result too, so all ranks end with the same bits.
"""

import torch
from torch import Tensor

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Turns what is to be summed into what travels, and back. This one changes nothing.

    Args:
        name: for messages and for the agreement between ranks.
        dtype: what float32 and float64 travel as; None: as they are.
    """

    def __init__(self, name: str, dtype: torch.dtype | None = None) -> None:
        self.name = name
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Compression.{self.name}"

    def changes(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of `dtype` travel as something else."""
        return self.dtype is not None and dtype in (torch.float32, torch.float64)

    def compress(self, flat: Tensor) -> Tensor:
        """Return what travels instead of `flat`: `flat` itself, or a new tensor."""
        return flat.to(self.dtype) if self.changes(flat.dtype) else flat

    def decompress(self, wire: Tensor, flat: Tensor) -> None:
        """Bring the sum of what travelled back into `flat`."""
        if wire is not flat:
            flat.copy_(wire)


class Compression:
    """The choices for `DistributedOptimizer(compression=...)`.

    `none`; `fp16`, for gradients within float16's range (beyond 65,504 they become inf, which a GradScaler
    notices); `bf16`, float32's range with 8 bits of precision.
    """

    none = Compressor("none")
    fp16 = Compressor("fp16", torch.float16)
    bf16 = Compressor("bf16", torch.bfloat16)
