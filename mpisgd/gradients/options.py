"""`ReductionOptions`: how the gradients of all ranks are combined."""

import math
from typing import NamedTuple

from mpisgd.arguments import check_flag, check_positive, shown
from mpisgd.compress.compressor import Compressor
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument

__all__ = ["DEFAULT_BUCKET_CAP_BYTES", "ReductionOptions", "check_options"]

DEFAULT_BUCKET_CAP_BYTES = 25 * 2**20


class ReductionOptions(NamedTuple):
    """How gradients are combined.

    Attributes:
        op: SUM or AVG.
        compression: what travels.
        predivide_factor: as it was asked for; see `divisor`.
        bucket_cap_bytes: gradients travel in buckets of at most this many bytes.
        overlap: whether buckets are sent during backward; None: where that can win, between hosts and where
            the GPU sends by itself.
        error_if_nonfinite: whether to look for infinities and NaNs in what this rank contributes.
        weighted: whether what ranks send is weighted before the sum, and divided after it (AVG only).
    """

    op: ReduceOp
    compression: Compressor
    predivide_factor: float
    bucket_cap_bytes: int
    overlap: bool | None
    error_if_nonfinite: bool = False
    weighted: bool = False

    @property
    def divisor(self) -> float:
        """What gradients are divided by before the sum; after it they are by size / divisor (AVG only)."""
        is_one = self.predivide_factor == 1.0 or not self.compression.traits.is_homogeneous or self.weighted
        return 1.0 if is_one else self.predivide_factor

    @property
    def element_op(self) -> ReduceOp:
        """What is done element by element: gradients that were divided or weighted before are summed."""
        return self.op if self.divisor == 1.0 and not self.weighted else ReduceOp.SUM


def check_options(options: ReductionOptions) -> None:
    """Raise InvalidArgument where options make no sense."""
    if not isinstance(options.op, ReduceOp) or options.op not in (ReduceOp.AVG, ReduceOp.SUM):
        raise InvalidArgument(
            f"op={shown(options.op)}; gradients can be combined by AVG, SUM or mpisgd.Adasum"
        )
    if not isinstance(options.compression, Compressor):
        raise InvalidArgument(
            f"compression={shown(options.compression)}; expected one of mpisgd.Compression's, "
            '"auto", or another mpisgd.Compressor'
        )
    check_positive("gradients", "gradient_predivide_factor", options.predivide_factor)
    if math.isinf(options.predivide_factor):
        raise InvalidArgument("gradient_predivide_factor=inf; expected a finite one")
    if options.predivide_factor != 1.0 and options.op is not ReduceOp.AVG:
        raise InvalidArgument("gradient_predivide_factor goes with op=AVG")
    check_positive("gradients", "bucket_cap_bytes", options.bucket_cap_bytes, whole=True)
    if options.overlap is not None:
        check_flag("gradients", "overlap", options.overlap)
