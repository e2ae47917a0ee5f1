"""`DataParallelCriterion`: the loss of outputs that stay on their ranks; only a number is sent."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mpisgd.arguments import check_callable
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument
from mpisgd.job.lifecycle import group_or_world
from mpisgd.nn.batch_outline import BatchOutline, agree_on_batch
from mpisgd.nn.data_parallel_functions import MeanLoss, new_token
from mpisgd.nn.row_exchange import RowExchange, gather_outcomes

__all__ = ["DataParallelCriterion"]

NAME = "DataParallelCriterion"


class DataParallelCriterion(nn.Module):
    """The parallel loss: each rank computes the loss of its rows; the result is their mean.

    With `DataParallel`, one rank gets all outputs, needs memory for them, and computes their loss alone. With
    `DataParallelCriterion` outputs stay on their ranks, and every rank runs the same program:

        model = mpisgd.nn.DataParallel(module, gather_outputs=False)
        criterion = mpisgd.nn.DataParallelCriterion(torch.nn.CrossEntropyLoss())
        loss = criterion(model(inputs), targets)     # inputs and targets count on rank 0 alone
        loss.backward()                              # then rank 0 has the gradients

    The targets are divided like the batch. Every rank gets the loss of the whole batch. Forward and backward
    are collective; the incoming gradient of `src` is used.

    Args:
        criterion: a module or function of (outputs, *targets) that returns a number, the mean of its rows; or
            their sum, where it has `reduction="sum"`.
        src, dim, group: as for `DataParallel`.
        weight: a function of the same arguments that returns the weight of a rank's mean, instead of its
            number of rows. A criterion that ignores some targets needs it: `weight=lambda outputs, targets:
            (targets != -100).sum()`.

    Raises:
        InvalidArgument: found locally, before anything is sent: the criterion has `reduction="none"`; from
            forward, on every rank: targets that cannot be divided, or a loss that is no number.
        Exception: from forward, what `criterion` raised on a rank; on every rank.

    Cost: sends the targets, and a number back.
    """

    def __init__(
        self,
        criterion: Callable[..., Tensor],
        *,
        src: int = 0,
        dim: int = 0,
        weight: Callable[..., Any] | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        check_callable(NAME, "criterion", criterion)
        if weight is not None:
            check_callable(NAME, "weight", weight)
        reduction = getattr(criterion, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise InvalidArgument(
                f"{NAME}: the criterion has reduction={reduction!r}; expected 'mean' or 'sum'"
            )
        self.criterion, self.weight, self.is_mean = criterion, weight, reduction == "mean"
        members = group_or_world(group)
        self._exchange = RowExchange(members, members.group_rank(NAME, "src", src), dim)

    def forward(self, outputs: Any, *targets: Any, **kwargs: Any) -> Tensor:
        """Return the loss of all rows, on every rank. Collective.

        Args:
            outputs: the result of `DataParallel(gather_outputs=False)` on this rank.
            targets, kwargs: those of all rows on `src`; ignored on other ranks.
        """
        exchange = self._exchange
        batch = agree_on_batch(NAME, (targets, kwargs), exchange, records_graph=torch.is_grad_enabled())
        works = exchange.is_root or batch.counts[exchange.group.rank] > 0
        args, options = batch.rebuild(self._divide(batch, (targets, kwargs), _device_of(outputs)))
        loss, mine, problem = None, None, None
        if works:
            try:
                loss, mine = self._loss(batch, outputs, args, options)
            except Exception as exc:  # the others wait for this rank's loss
                problem = exc
        everyone = gather_outcomes(exchange.group, mine, problem)
        share, dtype = _share(everyone, exchange)
        token = new_token() if works else outputs
        with torch.set_grad_enabled(batch.records_graph):
            weight = share if self.is_mean else 1.0
            total: Tensor = MeanLoss.apply(exchange, weight, dtype, token, loss)  # type: ignore[no-untyped-call]
        return total

    def _divide(self, batch: BatchOutline, given: Any, device: torch.device) -> list[Tensor]:
        """Return this rank's rows of the targets."""
        exchange, mine = self._exchange, []
        wholes = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        for place, outline in enumerate(batch.tensors):
            whole = wholes[place].to(device) if exchange.is_root else outline.placeholder(device)
            if outline.is_divided:
                mine.append(exchange.scatter(whole if exchange.is_root else None, whole, batch.counts))
            else:
                exchange.copy_one(whole)
                mine.append(whole)
        return mine

    def _loss(
        self, batch: BatchOutline, outputs: Any, targets: Any, kwargs: Any
    ) -> tuple[Tensor, tuple[float, torch.dtype]]:
        """Return this rank's loss, and (what it counts, its dtype)."""
        loss = self.criterion(outputs, *targets, **kwargs)
        if not isinstance(loss, Tensor) or loss.dim():
            raise InvalidArgument(f"{NAME}: the criterion has returned {_kind(loss)}; expected a number")
        weight = batch.counts[self._exchange.group.rank]
        if self.weight is not None:
            weight = self.weight(outputs, *targets, **kwargs)
        return loss, (float(weight), loss.dtype)


def _device_of(outputs: Any) -> torch.device:
    tensors = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


def _share(everyone: list[Any], exchange: RowExchange) -> tuple[float, torch.dtype]:
    """Return this rank's share of all weights, and the losses' dtype, of each rank's (weight, dtype)."""
    total = sum(said[0] for said in everyone if said is not None)
    mine = everyone[exchange.group.rank]
    return (0.0 if mine is None else mine[0] / total if total else float("nan")), everyone[exchange.root][1]


def _kind(value: Any) -> str:
    return (
        f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    )
