"""Attention of some queries to some keys by torch's fused kernel for CPUs, and the sum of such blocks.

A block's output is a mean of values, with the logarithm of the weights' sum (`lse`) beside it. So blocks
combine exactly: O = sum of exp(lse_j - lse) O_j with lse = logsumexp of the lse_j. The kernel's backward
takes the output and the lse of all blocks together, and returns what one of them adds to the gradients.

Source: Dao et al. 2022, "FlashAttention"; Liu et al. 2023, "Ring Attention with Blockwise Transformers".
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["RunningSum", "Scores", "accumulator_dtype", "attend", "attend_backward"]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Scores(NamedTuple):
    """What becomes of the products of queries and keys.

    Attributes:
        scale: by which they are multiplied.
        is_causal: whether a query sees only the keys up to its own place.
        mask: added to them, or None; 4-D, broadcasts over batch and heads.
    """

    scale: float
    is_causal: bool
    mask: Tensor | None


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return in which dtype blocks are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return the output of a block, [batch, heads, rows, width of values], and its lse, [batch, heads, rows].

    Args:
        query: [batch, heads, rows, width].
        key: [batch, heads of keys, columns, width]; each of its heads serves as many of the queries.
        value: [batch, heads of keys, columns, width of values].
        scores: see there. A query that sees no key of the block has an lse of -inf, and zeros.
    """
    operands = _of_one_width(*_of_all_heads(query, key, value))
    out, lse = _forward(*operands, 0.0, scores.is_causal, attn_mask=scores.mask, scale=scores.scale)
    out = out[..., : value.shape[-1]]
    if scores.mask is not None:  # of a query that sees nothing the kernel says 0, which is another lse
        is_blind = (scores.mask == -torch.inf).all(-1).expand(lse.shape)
        lse = lse.masked_fill(is_blind, -torch.inf)
        out = out.masked_fill(is_blind.unsqueeze(-1), 0)
    return out, lse


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `query`, `key` and `value` through one block, of their shapes.

    Args:
        grad: of the output, of the block's rows.
        query, key, value, scores: as in `attend`.
        out: of all blocks together, the block's rows.
        lse: of all blocks together, the block's rows.
    """
    query_wide, key_wide, value_wide = _of_one_width(*_of_all_heads(query, key, value))
    width = value_wide.shape[-1]
    grads = _backward(
        _of_width(grad, width),
        query_wide,
        key_wide,
        value_wide,
        _of_width(out, width),
        lse,
        0.0,
        scores.is_causal,
        attn_mask=scores.mask,
        scale=scores.scale,
    )
    for_query, for_key, for_value = (
        each[..., : like.shape[-1]] for each, like in zip(grads, (query, key, value), strict=True)
    )
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        for_key, for_value = (each.unflatten(1, (-1, shared)).sum(2) for each in (for_key, for_value))
    return for_query, for_key, for_value


def _of_all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat heads of keys and values that several heads of queries share."""
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    return query, key, value


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the last dimension with zeros, which change no score: the kernel takes one width for all."""
    width = max(query.shape[-1], value.shape[-1])
    query, key, value = (_of_width(each, width) for each in (query, key, value))
    return query, key, value


def _of_width(tensor: Tensor, width: int) -> Tensor:
    """Return a tensor whose last dimension is so long, and lies side by side in memory."""
    missing = width - tensor.shape[-1]
    if missing:
        return pad(tensor, (0, missing))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class RunningSum:
    """The blocks so far of all queries, added up in float32 or float64.

    Attributes:
        out: [batch, heads, rows, width].
        lse: [batch, heads, rows].
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out = out.to(accumulator_dtype(out.dtype))
        self.lse = lse

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Add a block of some of the rows, in place."""
        sum_out, sum_lse = self.out[:, :, rows], self.lse[:, :, rows]
        joined = torch.logaddexp(sum_lse, lse)
        base = joined.clamp(min=torch.finfo(joined.dtype).min)  # -inf - -inf is not a number
        sum_out.mul_((sum_lse - base).exp_().unsqueeze(-1))
        sum_out.addcmul_(out.to(sum_out.dtype), (lse - base).exp_().unsqueeze(-1))
        sum_lse.copy_(joined)
