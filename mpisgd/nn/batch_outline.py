"""What the root tells the other ranks of a batch before its tensors travel: the structure around them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mpisgd.collectives.objects import broadcast_object
from mpisgd.errors import InvalidArgument, MpisgdError
from mpisgd.nn.row_exchange import RowExchange, split_rows

__all__ = ["BatchOutline", "TensorOutline", "agree_on_batch", "outline_of"]


@dataclass(frozen=True)
class TensorOutline:
    """A tensor of a batch, without its values.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        wants_grad: whether the root wants its gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool

    @property
    def is_divided(self) -> bool:
        """Whether it has rows; a tensor without dimensions is copied to all ranks."""
        return bool(self.shape)

    def placeholder(self, device: torch.device) -> Tensor:
        """Return a tensor of this kind without values; a divided one takes no memory."""
        if self.is_divided:
            return torch.empty((), dtype=self.dtype, device=device).expand(self.shape)
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class BatchOutline:
    """The arguments of a call on the root.

    Attributes:
        arguments: tuples, lists and dictionaries with a `TensorOutline` in the place of each tensor.
        num_rows: of all divided tensors.
        counts: the rows of each rank.
        records_graph: whether the root is going to call backward.
    """

    arguments: Any
    num_rows: int
    counts: tuple[int, ...]
    records_graph: bool

    @property
    def tensors(self) -> list[TensorOutline]:
        """The outlines of all tensors."""
        leaves = pytree.tree_leaves(self.arguments)
        return [leaf for leaf in leaves if isinstance(leaf, TensorOutline)]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the arguments with `tensors` in their places."""
        left = iter(tensors)
        return pytree.tree_map(
            lambda leaf: next(left) if isinstance(leaf, TensorOutline) else leaf, self.arguments
        )


def outline_of(name: str, arguments: Any, exchange: RowExchange, records_graph: bool) -> BatchOutline:
    """Return the outline of a batch that this rank has.

    Raises:
        InvalidArgument: there is no tensor, or their numbers of rows differ.
    """
    leaves, structure = pytree.tree_flatten(arguments)
    rows: dict[int, tuple[int, ...]] = {}
    outlines = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            shape = tuple(leaf.shape)
            if shape and not -len(shape) <= exchange.dim < len(shape):
                raise InvalidArgument(
                    f"{name}: a tensor of the batch has the shape {list(shape)}, no dim {exchange.dim}"
                )
            if shape:
                rows.setdefault(shape[exchange.dim], shape)
            leaf = TensorOutline(shape, leaf.dtype, records_graph and leaf.requires_grad)
        outlines.append(leaf)
    if len(rows) != 1:
        shapes = " and ".join(str(list(shape)) for shape in rows.values())
        problem = f"tensors of different numbers of rows, {shapes}" if rows else "no tensor with rows"
        raise InvalidArgument(f"{name}: the batch has {problem}; dim={exchange.dim} counts rows")
    num_rows = next(iter(rows))
    counts = tuple(split_rows(num_rows, exchange.group.size, exchange.root))
    return BatchOutline(pytree.tree_unflatten(outlines, structure), num_rows, counts, records_graph)


def agree_on_batch(name: str, arguments: Any, exchange: RowExchange, records_graph: bool) -> BatchOutline:
    """Return the outline of the root's batch, on every rank. Collective.

    Args:
        name: for messages.
        arguments: on the root; not looked at elsewhere.
        exchange: the ranks.
        records_graph: as in `BatchOutline`, on the root.

    Raises:
        InvalidArgument: as `outline_of`; raised on every rank.
    """
    outcome: BatchOutline | InvalidArgument | None = None
    if exchange.is_root:
        try:
            outcome = outline_of(name, arguments, exchange, records_graph)
        except MpisgdError as exc:
            outcome = InvalidArgument(str(exc))
    outcome = broadcast_object(outcome, exchange.src, exchange.group)
    if isinstance(outcome, InvalidArgument):
        outcome.on_every_rank = True
        raise outcome
    assert outcome is not None
    return outcome
