"""Compression by casting: half the bytes (or a quarter) on the wire, the sum still in float32.

Each element's owner adds the halves of all ranks in float32 and rounds once, and takes its own rounded
result too, so all ranks end with the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mpisgd.compress.compressor import BucketLayout, Compressor, Traits
from mpisgd.compress.sum_reducer import SumReducer
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.methods.cast import paper
from mpisgd.methods.coding import Coding
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.synchronous.paper import Synchronous

__all__ = ["CASTS", "Cast", "CastReducer", "Compression"]


@dataclass(frozen=True, repr=False)
class Cast(Compressor):
    """Floating gradients are sent in another dtype.

    Attributes:
        name: for messages and for the agreement between ranks.
        dtype: the dtype in which float32 and float64 are sent; None: their own.
    """

    name: str
    dtype: torch.dtype | None = None

    @classmethod
    def examples(cls) -> Sequence["Cast"]:
        """See `Compressor`."""
        return tuple(CASTS.values())

    def __repr__(self) -> str:
        return f"Compression.{self.name}"

    @property
    def short_name(self) -> str:
        """The name alone."""
        return self.name

    @cached_property
    def traits(self) -> Traits:
        """What is of 16 bits travels as it is."""
        return Traits(dtypes=frozenset(() if self.dtype is None else (torch.float32, torch.float64)))

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of `dtype` are sent."""
        return self.dtype if self.dtype is not None and self.changes(dtype) else dtype

    def compress(self, flat: Tensor) -> Tensor:
        """Return the tensor that is sent for `flat`: `flat` itself, or a new one."""
        return flat.to(self.dtype) if self.changes(flat.dtype) else flat

    def decompress(self, wire: Tensor, flat: Tensor) -> None:
        """Bring the sum of what travelled back into `flat`."""
        if wire is not flat:
            flat.copy_(wire)

    def reducer(self, layout: BucketLayout) -> "CastReducer":
        """Return a reducer that casts a bucket, sums it and casts it back."""
        return CastReducer(self, layout)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`. A sum of narrower floats."""
        return Coding(collectives=("all_reduce",), element_s=1e-9, copies=0.5)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return Synchronous() if self.dtype is None else paper.Cast(self.dtype)


class CastReducer(SumReducer):
    """Casts, sums, casts back. Keeps nothing."""

    def __init__(self, cast: Cast, layout: BucketLayout) -> None:
        super().__init__(layout.numel * cast.wire_dtype(layout.dtype).itemsize)
        self._cast = cast

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Sum the cast bucket; see `BucketReducer.reduce`."""
        wire = self._cast.compress(bucket)
        super().reduce(wire, group, op)
        self._cast.decompress(wire, bucket)


class Compression:
    """The casts for `DistributedOptimizer(compression=...)`.

    `none`: no compression; `fp16`: float16, whose range ends at 65,504 (larger gradients become infinite,
    which a GradScaler detects); `bf16`: the range of float32 with 8 bits of precision.
    """

    none = Cast("none")
    fp16 = Cast("fp16", torch.float16)
    bf16 = Cast("bf16", torch.bfloat16)


CASTS = {name: cast for name, cast in vars(Compression).items() if isinstance(cast, Cast)}
