"""`DataParallel`: one rank has the batch, all ranks run the module on their rows of it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from mpisgd.arguments import check_flag, shown
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument
from mpisgd.job.lifecycle import group_or_world
from mpisgd.nn.batch_outline import BatchOutline, TensorOutline, agree_on_batch
from mpisgd.nn.data_parallel_functions import CopyAndScatter, GatherOutputs, new_token
from mpisgd.nn.output_rows import join_outputs
from mpisgd.nn.row_exchange import RowExchange, gather_outcomes

__all__ = ["DataParallel"]

NAME = "DataParallel"


class DataParallel(nn.Module):
    """Run `module` on all ranks, with the batch and the parameters of one rank.

    torch.nn.DataParallel with ranks in place of devices. Every rank calls forward; rank `src` passes the
    batch, and what the others pass is ignored:

        model = mpisgd.nn.DataParallel(module)
        outputs = model(inputs if mpisgd.rank() == 0 else None)
        loss = criterion(outputs, targets) if mpisgd.rank() == 0 else outputs
        loss.backward()

    The rows of the batch are divided among the ranks, all ranks get a copy of the parameters and buffers of
    `src`, and `src` gets the outputs of all rows. The other ranks get a placeholder tensor; they call its
    `backward()` when `src` calls backward, to run their part of the backward pass. `src` then has the
    gradients of the whole batch, equal to those of one process, and steps its optimizer. Since parameters are
    copied in each call, the other ranks need neither an optimizer nor equal parameters, and only `src` saves
    and loads.

    The batch consists of positional and keyword arguments: tensors, and tuples, lists and dictionaries of
    them. All tensors have the same number of rows along `dim`; tensors without dimensions and other values
    are copied. If there are fewer rows than ranks, the ranks without a row do not run the module. Outputs are
    concatenated; tensors without dimensions become the entries of a vector, as in torch. Outputs that are not
    tensors are those of `src`.

    BatchNorm uses the statistics of each rank's rows, and keeps those of `src`, as in torch; `SyncBatchNorm`
    needs rows on every rank. Forward is collective, and so is backward if `src` calls it. Whether gradients
    are recorded (`torch.no_grad()`) depends on `src` alone; call `train()` and `eval()` on all ranks.

    Args:
        module: the same on all ranks; the values of its parameters matter on `src` only.
        src: global rank that has the batch and gets the outputs.
        dim: the dimension along which the batch is divided.
        gather_outputs: False leaves each rank's outputs where they are, for `DataParallelCriterion`.
        group: the ranks that take part, all of the job by default.

    Raises:
        InvalidArgument, InvalidRank: found locally, before anything is sent; from forward: the batch cannot
            be divided, raised on every rank.
        Exception: from forward, what `module` raised on a rank; on every rank.

    Cost: forward sends parameters, buffers and rows to each rank, and outputs back; backward sends the
        gradients of all of these in the opposite directions. Prefer `DistributedOptimizer` if each rank can
        load its own data: it sends only gradients, and no rank is a bottleneck.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        src: int = 0,
        dim: int = 0,
        gather_outputs: bool = True,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise InvalidArgument(f"{NAME}: module is a {type(module).__name__}; expected a torch.nn.Module")
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise InvalidArgument(f"{NAME}: dim={shown(dim)}; expected a dimension")
        self.module = module
        self.gather_outputs = check_flag(NAME, "gather_outputs", gather_outputs)
        members = group_or_world(group)
        self._exchange = RowExchange(members, members.group_rank(NAME, "src", src), dim)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of all rows on `src`, a placeholder on the other ranks. Collective."""
        exchange = self._exchange
        batch = agree_on_batch(NAME, (args, kwargs), exchange, self._records_graph(args, kwargs))
        works = exchange.is_root or batch.counts[exchange.group.rank] > 0
        with torch.set_grad_enabled(batch.records_graph):
            token, params, tensors = self._enter(batch, (args, kwargs))
            if not self.gather_outputs:
                return self._run(batch, params, tensors) if works else token
            outputs, problem = None, None
            if works:
                try:
                    outputs = self._run(batch, params, tensors)
                except Exception as exc:  # the others wait for what this rank returns
                    problem = exc
            return self._leave(token, outputs, problem, works)

    def _records_graph(self, args: Any, kwargs: Any) -> bool:
        """Return whether the result needs a gradient; what holds on the root counts."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return torch.is_grad_enabled() and any(t.requires_grad for t in [*self.module.parameters(), *tensors])

    def _device(self) -> torch.device:
        """Return where the module is."""
        return next((tensor.device for tensor in self.module.parameters()), torch.device("cpu"))

    def _enter(self, batch: BatchOutline, arguments: Any) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        """Return the token, this rank's copies of the parameters, and its rows of the batch's tensors."""
        params, buffers = dict(self.module.named_parameters()), list(self.module.buffers())
        order = sorted(range(len(batch.tensors)), key=lambda place: batch.tensors[place].is_divided)
        tensors = self._tensors(batch, arguments)
        copied = [*params.values(), *buffers, *(tensors[i] for i in order if not batch.tensors[i].is_divided)]
        divided = [tensors[place] for place in order if batch.tensors[place].is_divided]
        wanted = [
            *(batch.records_graph and param.requires_grad for param in params.values()),
            *(False for _ in buffers),
            *(batch.tensors[place].wants_grad for place in order),
        ]
        options = (self._exchange, batch.counts, wanted, len(copied))
        outputs = CopyAndScatter.apply(*options, new_token(), *copied, *divided)  # type: ignore[no-untyped-call]
        token, *entered = outputs
        mine = dict(zip(order, entered[len(params) + len(buffers) :], strict=True))
        copies = dict(zip(params, entered, strict=False))
        return token, copies, [mine[place] for place in range(len(order))]

    def _tensors(self, batch: BatchOutline, arguments: Any) -> list[Tensor]:
        """Return the tensors of the batch on the root, elsewhere such without values."""
        device = self._device()
        if not self._exchange.is_root:
            return [outline.placeholder(device) for outline in batch.tensors]
        return [leaf.to(device) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]

    def _run(self, batch: BatchOutline, params: dict[str, Tensor], tensors: list[Tensor]) -> Any:
        args, kwargs = batch.rebuild(tensors)
        return functional_call(self.module, params, args, kwargs)

    def _leave(self, token: Tensor, outputs: Any, problem: Exception | None, works: bool) -> Any:
        """Return all ranks' outputs on the root, the token elsewhere; or raise what a rank has raised."""
        leaves, structure = pytree.tree_flatten(outputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        mine = [TensorOutline(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors] if works else None
        rows = join_outputs(gather_outcomes(self._exchange.group, mine, problem), self._exchange)
        if not rows:
            return outputs if self._exchange.is_root else token
        vectors = [tensor if tensor.dim() else tensor.unsqueeze(0) for tensor in tensors]
        options = (self._exchange, rows, self._device())
        left = GatherOutputs.apply(*options, token, *vectors)  # type: ignore[no-untyped-call]
        if not self._exchange.is_root:
            return left
        wholes = iter(left)
        filled = [next(wholes) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(filled, structure)
