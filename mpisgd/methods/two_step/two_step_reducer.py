"""`TwoStepReducer`: reduces buckets by a `TwoStepExchange`."""

from collections.abc import Sequence

from torch import Tensor

from mpisgd.compress.compressor import BucketLayout, BucketReducer
from mpisgd.compress.sign_code import wide_dtype
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.methods.two_step.two_step_exchange import Errors, MakeCode, TwoStepExchange

__all__ = ["TwoStepReducer", "lengths_of"]


def lengths_of(layout: BucketLayout) -> list[int]:
    """Return how many elements each parameter has that has any."""
    return [shape.numel() for shape in layout.shapes if shape.numel()]


class TwoStepReducer(BucketReducer):
    """Has the owners of chunks average them, and send the average as codes.

    Args:
        lengths: of the tensors in a bucket.
        layout: of the bucket.
        code: makes the codes of chunks.
        errors: what is left out; None: that is lost.
    """

    state: Errors | None

    def __init__(
        self, lengths: Sequence[int], layout: BucketLayout, code: MakeCode, errors: Errors | None
    ) -> None:
        self._lengths, self._layout, self._code = lengths, layout, code
        self._exchange: TwoStepExchange | None = None
        self.state = errors

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Replace the bucket by the compressed mean, or `size` times that; see `BucketReducer.reduce`."""
        if self._exchange is None:
            dtype, device = wide_dtype(self._layout.dtype), self._layout.device
            self._exchange = TwoStepExchange(self._lengths, dtype, device, group, self.state, self._code)
        values = bucket.to(wide_dtype(bucket.dtype))
        self._exchange.average(values)
        bucket.copy_(values.mul_(group.size) if op is ReduceOp.SUM else values)

    def bytes_on_the_wire(self, size: int) -> int:
        """Return the bytes that `TwoStepExchange` sends."""
        dtype = wide_dtype(self._layout.dtype)
        return TwoStepExchange.bytes_on_the_wire(self._lengths, dtype, size, self._code)

    def kept_apart(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the server's error of those elements that it is of: this rank's chunk, as it was last.

        Also before the first reduction, in which it may be one that was loaded.
        """
        errors = self.state
        if errors is None or errors.server_error is None or errors.server_begin is None:
            return {}
        error, begin = errors.server_error[0], int(errors.server_begin)
        of_chunk = f"server, {begin} to {begin + error.numel()}"  # one of another chunk begins anew
        return {of_chunk: error[max(0, start - begin) : max(0, stop - begin)]}
