"""EF-signSGD: gradients as one bit per element; what that leaves out is added to the next gradient.

Source: Karimireddy, Rebjock, Stich and Jaggi 2019, "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", algorithm 1, with the compressed gradients of all ranks averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpisgd.arguments import check_flag
from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.compress.compressor import BucketLayout, BucketReducer, Compressor, Traits
from mpisgd.compress.residual import Waiting, fitted
from mpisgd.compress.sign_code import SignCode, wide_dtype
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.methods.coding import Coding
from mpisgd.methods.one_bit import paper
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.two_step.cost import CODING
from mpisgd.methods.two_step.paper import TwoStep
from mpisgd.methods.two_step.two_step_exchange import Errors
from mpisgd.methods.two_step.two_step_reducer import TwoStepReducer, lengths_of

__all__ = ["OneBit"]


class OneBitCodec:
    """Signs and a mean magnitude for each parameter: a codec of `SignCode`.

    Args:
        lengths: of the parameters that have elements.
        dtype: float32 or float64.
    """

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self._code = SignCode(lengths, dtype)
        self.nbytes = self._code.nbytes

    def compress(self, flat: Tensor, random: np.random.Generator) -> Tensor:
        """Return the magnitudes and the signs."""
        message = torch.empty(self.nbytes, dtype=torch.uint8, device=flat.device)
        self._code.encode(flat.clone(), message)
        return message

    def decompress(self, message: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add the magnitudes with their signs, or subtract them."""
        out.add_(self._code.decode(message), alpha=sign)


@dataclass(frozen=True)
class OneBit(Compressor):
    """Sends signs and the mean magnitude of each parameter; error feedback keeps the rest.

    On rank i, with gradient g_i and residual e_i (zero at first), in every step and for each parameter

        p_i = g_i + e_i             what is meant
        D_i = |p_i|_1 / d sign(p_i) what is sent: d signs and one number
        e_i = p_i - D_i             what is left for the next step
        g   = mean of D_i           what every rank applies

    For SGD, with momentum or without. Error feedback delays parts of the gradient, which disturbs Adam's
    variance: Adam trains far worse with it, so use `mpisgd.OneBitAdam`.

    Each rank has its own residual, which is in its `state_dict()`. Infinite and NaN gradients are sent as
    such, and do not change the residual.

    Attributes:
        two_step: whether the average is compressed, too, by the ranks that compute it, which have further
            residuals: see `TwoStepExchange`. Of n bytes of float32 gradients each rank then sends 2 (size -
            1) / size n / 32, otherwise (size - 1) n / 32: as much on two ranks, more on others.
    """

    two_step: bool = False

    @classmethod
    def examples(cls) -> Sequence["OneBit"]:
        """See `Compressor`."""
        return (cls(), cls(two_step=True))

    def __post_init__(self) -> None:
        check_flag("OneBit", "two_step", self.two_step)

    @cached_property
    def traits(self) -> Traits:
        """The error of the magnitudes is added to the next gradient."""
        return Traits(has_error_feedback=True)

    def codec(self, layout: BucketLayout) -> OneBitCodec:
        """Return the codec of signs and magnitudes: |p - D|^2 = |p|^2 - |p|_1^2 / d."""
        return OneBitCodec(lengths_of(layout), layout.dtype)

    def reducer(self, layout: BucketLayout) -> BucketReducer:
        """Return the reducer, which sends the signs of a bucket and keeps the rest."""
        if self.two_step:
            return TwoStepReducer(lengths_of(layout), layout, SignCode, Errors())
        return _GatherReducer(layout)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`.

        Signs and a magnitude per parameter go to all ranks.
        """
        if self.two_step:
            return CODING
        return Coding(element_s=5e-9, copies=2.0)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return TwoStep() if self.two_step else paper.OneBit()


class _GatherReducer(BucketReducer):
    """Gathers the signs of all ranks, and averages them on each."""

    state: Waiting

    def __init__(self, layout: BucketLayout) -> None:
        self._code = SignCode(lengths_of(layout), wide_dtype(layout.dtype))
        self._layout, self.state = layout, Waiting()
        self.state.residual = self._residual  # its memory is there from the beginning

    @property
    def _residual(self) -> Tensor:
        layout, dtype = self._layout, wide_dtype(self._layout.dtype)
        self.state.residual = kept = fitted(self.state.residual, layout.numel, dtype, layout.device)
        return kept

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Replace the bucket by the mean, or the sum, of everyone's signs; see `BucketReducer.reduce`."""
        message = torch.empty(self._code.nbytes, dtype=torch.uint8, device=bucket.device)
        rest = bucket + self._residual
        if self._code.encode(rest, message).isfinite().all():
            self.state.residual = rest
        everyone = message.new_empty(group.size, len(message))
        all_gather_into_tensor(everyone, message, group)
        del message  # is among them
        total = torch.zeros_like(rest)
        for row in everyone:
            total += self._code.decode(row)
        bucket.copy_(total if op is ReduceOp.SUM else total.div_(group.size))

    def bytes_on_the_wire(self, size: int) -> int:
        """Return (size - 1) / 8 of the elements, and as many magnitudes of each parameter."""
        return (size - 1) * self._code.nbytes
