"""Attention whose keys and values are divided among the ranks of a ring, forward and backward.

n ranks; each has its queries all the time. In step j it computes with the keys and values of rank r - j,
while those of rank r - j - 1 come. In backward the keys and values travel once more, and behind them what the
ranks so far have added to their gradients, which so comes home after n - 1 messages.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpisgd.context.block import RunningSum, Scores, accumulator_dtype, attend, attend_backward
from mpisgd.context.division import block_of
from mpisgd.context.masks import columns_of
from mpisgd.context.ring import Ring
from mpisgd.transport.messages.message_work import MessageWork

__all__ = ["AttentionCall", "RingAttention"]


class AttentionCall(NamedTuple):
    """What a call of attention is beside its tensors.

    Attributes:
        ring: the ranks that the sequences are divided among.
        is_causal: whether a query sees only the keys up to its own place.
        scale: of the products of queries and keys.
        text: describes it in full; the same on all ranks.
        number: of the call in the ring.
    """

    ring: Ring
    is_causal: bool
    scale: float
    text: str
    number: int


class RingAttention(torch.autograd.Function):
    """[batch, heads, rows, width] and keys and values of this rank, to this rank's rows of the output."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall
    ) -> Tensor:
        """Attend to the keys of all ranks. Collective."""
        ring, total = call.ring, None
        for source, (keys, values) in ring.rotate([key, value]):
            block = block_of(ring.rank, source, query.shape[2], key.shape[2], call.is_causal)
            scores = Scores(call.scale, block.is_causal, columns_of(mask, source, ring.size, query.dtype))
            out, lse = attend(
                query[:, :, block.rows], keys[:, :, block.columns], values[:, :, block.columns], scores
            )
            if total is None:  # this rank's own keys, all rows
                total = RunningSum(out, lse)
            else:
                total.add(block.rows, out, lse)
        assert total is not None
        output = total.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, output, total.lse)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, those of keys and values from the queries of all ranks. Collective."""
        query, key, value, mask, output, lse = ctx.saved_tensors
        call: AttentionCall = ctx.call
        ring, dtype = call.ring, accumulator_dtype(query.dtype)
        ring.agree("scaled_dot_product_attention backward", lambda: call.text, when=f"call {call.number}")
        lse = lse.masked_fill(lse == -torch.inf, 0)  # of a query that sees no key: exp(-inf - 0) = 0
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        for_query, travelling = None, None
        for source, (keys, values) in ring.rotate([key, value]):
            if travelling is not None:
                travelling.expect(source)
            block = block_of(ring.rank, source, query.shape[2], key.shape[2], call.is_causal)
            scores = Scores(call.scale, block.is_causal, columns_of(mask, source, ring.size, query.dtype))
            rows, columns = block.rows, block.columns
            added_to_query, *added = attend_backward(
                grad[:, :, rows],
                query[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                output[:, :, rows],
                lse[:, :, rows],
                scores,
            )
            if for_query is None or travelling is None:  # this rank's own keys
                for_query = added_to_query.to(dtype)
                travelling = _TravellingSum([each.to(dtype) for each in added], ring)
            else:
                for_query[:, :, rows] += added_to_query
                travelling.add(columns, added)
            del added_to_query, added  # before the next ones are made
        assert for_query is not None
        assert travelling is not None
        for_key, for_value = travelling.come_home()
        return for_query.to(query.dtype), for_key.to(key.dtype), for_value.to(value.dtype), None, None


class _TravellingSum:
    """Gradients of keys and values on their way around the ring, to which each rank adds its own.

    The sum for a rank begins at the one after it, and ends there, where it is added to that rank's own.

    Args:
        own: what this rank adds to the gradients of its own keys and values; overwritten.
        ring: the ranks.
    """

    def __init__(self, own: list[Tensor], ring: Ring) -> None:
        self._own, self._ring = own, ring
        self._here: list[Tensor] = []
        self._there: list[Tensor] = []
        self._arriving: list[MessageWork] = []
        self._leaving: list[MessageWork] = []

    def expect(self, source: int) -> None:
        """Begin to receive what others have added for rank `source`, if any have."""
        self._here, self._there = self._there, self._here
        if source == (self._ring.rank - 1) % self._ring.size:  # this rank is the first one after it
            self._here = [tensor.new_zeros(tensor.shape) for tensor in self._own]
            return
        self._here = self._here or [tensor.new_empty(tensor.shape) for tensor in self._own]
        self._arriving = self._ring.receive(self._here)

    def add(self, columns: slice, added: Sequence[Tensor]) -> None:
        """Add this rank's part for the rank that was expected, and send the sum on its way."""
        _wait_for(self._arriving)
        for total, part in zip(self._here, added, strict=True):
            total[:, :, columns] += part
        _wait_for(self._leaving)  # so that the next sum may come where this one was
        self._leaving = self._ring.send(self._here)

    def come_home(self) -> list[Tensor]:
        """Wait for the sum of the other ranks for this one; return it with this rank's own."""
        if self._ring.size > 1:
            self.expect(self._ring.rank)
            _wait_for(self._arriving)
            for total, part in zip(self._own, self._here, strict=True):
                total += part
            _wait_for(self._leaving)
        return self._own


def _wait_for(works: list[MessageWork]) -> None:
    for work in works:
        work.wait()
    works.clear()
