"""Where the graph of a data-parallel call goes from one rank to all and back, as autograd nodes.

               CopyAndScatter                  module                    GatherOutputs
    root     parameters, batch  ---copies--->  own rows  ---> outputs  ---all rows--->  outputs
    others   token              ---and rows--> own rows  ---> outputs  -------------->  token

Backward goes the other way: the gradients of the outputs are divided as the rows were, the gradients of the
copies are added up on the root. Each rank has one node of each kind whatever it computes in between, so all
communicate in one order. The token, a number without a meaning, ties the nodes together on ranks that have
nothing else to return: its `backward()` is the rank's part in that of the root.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.collectives.objects import broadcast_object
from mpisgd.dtypes import ReduceOp
from mpisgd.nn.output_rows import OutputRows
from mpisgd.nn.row_exchange import RowExchange

__all__ = ["CopyAndScatter", "GatherOutputs", "MeanLoss", "new_token"]


def new_token() -> Tensor:
    """Return a tensor that stands in the graph of a rank without tensors of its own."""
    return torch.zeros((), requires_grad=True)


class CopyAndScatter(torch.autograd.Function):
    """From the root's parameters and batch to each rank's copies and rows.

    Outputs: the token, a copy of each copied tensor, this rank's rows of each divided one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        exchange: RowExchange,
        counts: Sequence[int],
        wanted: Sequence[bool],
        num_copied: int,
        token: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """`tensors`: `num_copied` copied ones, then those divided by rows; `wanted`: which gradients."""
        copied, divided = tensors[:num_copied], tensors[num_copied:]
        exchange.copy(copied)
        rows = [exchange.scatter(whole if exchange.is_root else None, whole, counts) for whole in divided]
        outputs = (*(tensor.detach() for tensor in copied), *rows)
        ctx.mark_non_differentiable(*(out for out, wants in zip(outputs, wanted, strict=True) if not wants))
        ctx.set_materialize_grads(False)
        ctx.exchange, ctx.counts, ctx.wanted, ctx.num_copied = exchange, counts, wanted, num_copied
        ctx.likes = [_like(tensor) for tensor in tensors]
        return token.clone(), *outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token_grad: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        """Add up the gradients of copies on the root, and gather those of rows there."""
        found: list[Tensor | None] = [None] * len(grads)
        copied = [place for place in range(ctx.num_copied) if ctx.wanted[place]]
        sums = ctx.exchange.add_up([grads[place] for place in copied], [ctx.likes[place] for place in copied])
        for place, total in zip(copied, sums, strict=True):
            found[place] = total
        for place in range(ctx.num_copied, len(grads)):
            if ctx.wanted[place]:
                found[place] = ctx.exchange.gather(grads[place], ctx.likes[place], ctx.counts)
        return None, None, None, None, token_grad, *found


def _like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and device that takes no memory."""
    return tensor.detach().new_empty(()).expand(tensor.shape)


class GatherOutputs(torch.autograd.Function):
    """From each rank's outputs to the root. Outputs: all rows of each on the root, the token elsewhere."""

    @staticmethod
    def forward(
        ctx: Any,
        exchange: RowExchange,
        rows: Sequence[OutputRows],
        device: torch.device,
        token: Tensor,
        *outputs: Tensor,
    ) -> Any:
        """`outputs`: this rank's, each with rows; none at all on a rank that had nothing to do."""
        ctx.exchange, ctx.rows, ctx.device, ctx.has_outputs = exchange, rows, device, bool(outputs)
        ctx.set_materialize_grads(False)
        parts = outputs or [None] * len(rows)
        wholes = [
            row.by(exchange).gather(part, row.like(device), row.counts)
            for part, row in zip(parts, rows, strict=True)
        ]
        if not exchange.is_root:
            return token.clone()
        ctx.mark_non_differentiable(
            *(whole for whole, row in zip(wholes, rows, strict=True) if not row.outline.wants_grad)
        )
        return tuple(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Divide the gradients that the root has."""
        exchange: RowExchange = ctx.exchange
        mine = [grad is not None for grad in grads] if exchange.is_root else None
        present = broadcast_object(mine, exchange.src, exchange.group)
        found: list[Tensor | None] = []
        for place, row in enumerate(ctx.rows):
            whole = grads[place] if exchange.is_root else None
            wanted = row.outline.wants_grad and present[place]
            found.append(
                row.by(exchange).scatter(whole, row.like(ctx.device), row.counts) if wanted else None
            )
        return None, None, None, torch.zeros(()), *(found if ctx.has_outputs else [])


class MeanLoss(torch.autograd.Function):
    """From each rank's loss to that of all, on every rank; in backward the root's gradient counts."""

    @staticmethod
    def forward(
        ctx: Any, exchange: RowExchange, weight: float, dtype: torch.dtype, token: Tensor, loss: Tensor | None
    ) -> Tensor:
        """`loss`: this rank's, None where it had nothing to do; `weight`: of it in the result."""
        ctx.exchange, ctx.weight, ctx.has_loss = exchange, weight, loss is not None
        total = torch.zeros((), dtype=dtype, device=token.device if loss is None else loss.device)
        if loss is not None and weight:  # where nothing counts, the mean may be a NaN
            total += loss.detach() * weight
        all_reduce(total, ReduceOp.SUM, exchange.group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Hand the root's gradient to all ranks."""
        grad = grad.clone()
        ctx.exchange.copy_one(grad)
        return None, None, None, torch.zeros(()), grad * ctx.weight if ctx.has_loss else None
