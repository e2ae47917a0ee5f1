"""`ReductionOptions`: how the gradients of all ranks become one."""

import math
from typing import NamedTuple

from mpisgd.arguments import check_flag, check_positive, shown
from mpisgd.compress.cast import Compressor
from mpisgd.core.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument

__all__ = ["ReductionOptions", "check_options"]


class ReductionOptions(NamedTuple):
    """How gradients become one.

    Attributes:
        op: SUM or AVG.
        compression: what travels.
        predivide_factor: divide by this before the sum, and by size / factor after it (AVG only).
        bucket_cap_bytes: gradients travel in buckets of at most this many bytes.
        overlap: whether buckets set out during backward; None: where that can win, between hosts and where
            the GPU sends by itself.
        error_if_nonfinite: whether to look for infinities and NaNs in what this rank contributes.
    """

    op: ReduceOp
    compression: Compressor
    predivide_factor: float
    bucket_cap_bytes: int
    overlap: bool | None
    error_if_nonfinite: bool = False


def check_options(recipe: ReductionOptions) -> None:
    """Raise InvalidArgument where a recipe makes no sense."""
    if not isinstance(recipe.op, ReduceOp) or recipe.op not in (ReduceOp.AVG, ReduceOp.SUM):
        raise InvalidArgument(f"op={shown(recipe.op)}; gradients can be combined by AVG or SUM")
    if not isinstance(recipe.compression, Compressor):
        raise InvalidArgument(
            f"compression={shown(recipe.compression)}; expected one of mpisgd.Compression's"
        )
    check_positive("gradients", "gradient_predivide_factor", recipe.predivide_factor)
    if math.isinf(recipe.predivide_factor):
        raise InvalidArgument("gradient_predivide_factor=inf; expected a finite one")
    if recipe.predivide_factor != 1.0 and recipe.op is not ReduceOp.AVG:
        raise InvalidArgument("gradient_predivide_factor goes with op=AVG")
    check_positive("gradients", "bucket_cap_bytes", recipe.bucket_cap_bytes, whole=True)
    if recipe.overlap is not None:
        check_flag("gradients", "overlap", recipe.overlap)
