"""Batch normalization with the statistics of all ranks, and its gradient.

The statistics depend on every rank's input, so the gradient of one rank's input needs sums over all ranks.
With y = w xhat + b, xhat = (x - mean) / std, and N values per channel and the dy of all ranks:

    db = sum dy        dw = sum dy xhat        dx = w / std (dy - (db + dw xhat) / N)

dx takes db and dw of all ranks. The returned gradients of w and b are those of this rank, to be averaged with
the gradients of the other parameters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mpisgd.nn.batch_statistics import BatchStatistics, statistics_dtype

__all__ = ["normalize"]


def normalize(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: BatchStatistics,
    eps: float,
    add_up: Callable[[Tensor], object],
) -> Tensor:
    """Return `values` normalized by the statistics of all ranks' values, times `weight`, plus `bias`.

    Its backward calls `add_up` where `values` needs a gradient, also for an empty batch.

    Args:
        values: [batch, channels, ...] of a floating dtype, unchanged and kept for backward.
        weight, bias: [channels] or None, of any floating dtype; they are used in that of the statistics.
        statistics: of all ranks' `values`.
        eps: added to the variance.
        add_up: replaces a tensor, [2 * channels] of float64, by its sum over the ranks.
    """
    dtype = statistics_dtype(values.dtype)
    mean, var = statistics.mean.to(dtype), statistics.var.to(dtype)
    inputs = (values, weight, bias, mean, var, statistics.count, eps, add_up)
    out: Tensor = _Normalize.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


class _Normalize(torch.autograd.Function):
    """`normalize`, with mean and var in the statistics' dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
        add_up: Callable[[Tensor], object],
    ) -> Tensor:
        ctx.save_for_backward(values, weight, bias, mean, var, count)
        ctx.eps, ctx.add_up = eps, add_up
        return _scale(values, mean, var, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, bias, mean, var, count = ctx.saved_tensors
        sums = _local_sums(grad, values, mean, var, ctx.eps)
        grad_weight, grad_bias = (
            total.to(param.dtype) if needed else None
            for total, param, needed in zip(sums, (weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        grad_values = None
        if ctx.needs_input_grad[0]:
            totals = torch.cat(sums).double()
            ctx.add_up(totals)
            slope, offset = totals.div_(-count.clamp(min=1)).to(mean.dtype).chunk(2)
            # The part with xhat is itself a batch norm, computed by torch's fused kernel. 16-bit floats are
            # accumulated in float32 and rounded once.
            gain = (var + ctx.eps).rsqrt()
            if weight is not None:
                gain = gain * weight.to(gain.dtype)
            out = _scale(values.to(mean.dtype), mean, var, gain * slope, gain * offset, ctx.eps)
            channelwise = (1, -1) + (1,) * (values.dim() - 2)
            grad_values = out.addcmul_(grad, gain.view(channelwise)).to(values.dtype)
        return grad_values, grad_weight, grad_bias, None, None, None, None, None


def _scale(
    values: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return (values - mean) / sqrt(var + eps) * weight + bias: torch's batch norm with given statistics."""
    if values.numel() == 0:
        return torch.empty_like(values)
    weight, bias = (None if param is None else param.to(mean.dtype) for param in (weight, bias))
    return F.batch_norm(values, mean, var, weight, bias, training=False, eps=eps)


def _local_sums(grad: Tensor, values: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return this rank's dw and db: the gradients of batch norm with given statistics."""
    if values.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad, values, torch.ones_like(mean), mean, var, None, None, False, eps, [False, True, True]
    )
    return grad_weight, grad_bias
