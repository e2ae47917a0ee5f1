"""Scatter a data set that only one rank has: each rank gets a shard.

The data may fill more than half of the source's memory, so rows are sent in rounds, and the source needs
memory for one round beside its data. An error on the source, such as an unreadable item, is sent in place of
the data, so that every rank raises it.
"""

import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from mpisgd.arguments import check_flag, check_seed
from mpisgd.collectives.gather import scatter
from mpisgd.collectives.objects import broadcast_object, scatter_object
from mpisgd.collectives.tensor_arguments import check_tensor
from mpisgd.core.group import Group
from mpisgd.data.partition import length_of, split_evenly
from mpisgd.errors import InvalidArgument, MpisgdError
from mpisgd.job.lifecycle import group_or_world

__all__ = ["ItemDataset", "scatter_dataset"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

NAME = "scatter_dataset"
ROUND_BYTES = 32 * 2**20  # of the tensors of one round, over all ranks
ROUND_ITEMS = 64  # pickled per round and rank: their size is not known beforehand


class ItemDataset(Dataset[T_co]):
    """A map-style data set of the items in a list."""

    def __init__(self, items: Sequence[T_co]) -> None:
        if not hasattr(type(items), "__len__") or not hasattr(type(items), "__getitem__"):
            raise InvalidArgument(f"ItemDataset: items is a {type(items).__name__}; expected a list")
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> T_co:
        return self.items[index]


@dataclass(frozen=True)
class _Plan:
    """Known to all ranks; `columns`: dtype and row shape of each tensor, None for pickled items."""

    total: int
    columns: tuple[tuple[torch.dtype, tuple[int, ...]], ...] | None


@dataclass(frozen=True)
class _Failure:
    """An error of the source, sent to the other ranks."""

    text: str


class _Source:
    """The data set on the source rank: item i is `base[rows[i]]`."""

    def __init__(self, dataset: "Dataset[Any] | None", shuffle: bool, seed: int) -> None:
        if dataset is None:
            raise InvalidArgument("the data set is None on the rank that should have it; is src right?")
        self.base, self.rows = _flattened(dataset)
        if shuffle:
            generator = torch.Generator().manual_seed(seed)
            self.rows = self.rows[torch.randperm(len(self.rows), generator=generator)]
        self.tensors = [tensor.detach() for tensor in _columns(self.base)]

    @property
    def plan(self) -> _Plan:
        columns = tuple((tensor.dtype, tuple(tensor.shape[1:])) for tensor in self.tensors)
        return _Plan(len(self.rows), columns or None)

    def tensor_rows(self, column: int, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of one tensor; beyond the end, the last row."""
        wanted = torch.arange(start, stop).clamp(max=len(self.rows) - 1)
        return self.tensors[column][self.rows[wanted]].cpu()

    def pickled_items(self, start: int, stop: int) -> bytes:
        """Return a pickled list of the items `start` to `stop`."""
        return _pickled([self._item(row) for row in self.rows[start:stop].tolist()])

    def _item(self, row: int) -> Any:
        try:
            return self.base[row]
        except Exception as exc:
            raise InvalidArgument(f"item {row} cannot be read: {type(exc).__name__}: {exc}") from exc


def _flattened(dataset: "Dataset[Any]") -> "tuple[Dataset[Any], Tensor]":
    """Return the data set under any number of subsets, and the rows that they select."""
    # Exactly this class: a derived one may do more than look an item up.
    if type(dataset) is not Subset:
        return dataset, torch.arange(length_of(dataset, NAME))
    base, rows = _flattened(dataset.dataset)
    return base, rows[torch.as_tensor(dataset.indices, dtype=torch.int64)]


def _columns(dataset: "Dataset[Any]") -> Sequence[Tensor]:
    if type(dataset) is not TensorDataset:
        return ()
    return [check_tensor(NAME, tensor, f"tensor {i}") for i, tensor in enumerate(dataset.tensors)]


class _ItemPickler(pickle.Pickler):
    """Pickles a slice of a tensor without the rest of its storage, which torch would include."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided and _is_part(obj):
            whole: Any = obj.detach().clone()
            return whole.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _is_part(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _pickled(obj: Any) -> bytes:
    file = io.BytesIO()
    _ItemPickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getvalue()


def _attempt(make: Callable[[], T]) -> "tuple[T | _Failure, Exception | None]":
    """Return the result of `make`, or a failure to send in its place, with its cause."""
    try:
        return make(), None
    except Exception as exc:
        text = str(exc) if isinstance(exc, MpisgdError) else f"{type(exc).__name__}: {exc}"
        return _Failure(text.removeprefix(f"{NAME}: ")), exc


def _succeeded(outcome: "T | _Failure", src: int, cause: Exception | None) -> T:
    """Return the outcome of the source's attempt, or raise its failure on every rank."""
    if isinstance(outcome, _Failure):
        error = InvalidArgument(f"{NAME}: rank {src}: {outcome.text}")
        error.on_every_rank = True
        raise error from cause
    return outcome


def scatter_dataset(
    dataset: "Dataset[T_co] | None",
    src: int = 0,
    *,
    shuffle: bool = False,
    seed: int = 0,
    group: Group | None = None,
) -> "Dataset[T_co]":
    """Give each rank its shard of a data set that only rank `src` has.

    Collective: all ranks of `group` call it in the same order. Shards are consecutive, in rank order, and a
    partition of the data set. Their sizes differ by at most one, the larger first; with fewer items than
    ranks the last ranks get an empty one.

    Args:
        dataset: map-style, with a length; read on `src` only and unchanged.
        src: global rank that has it.
        shuffle: shard a random permutation, chosen by `seed`, instead of the data set's order.
        seed: of the permutation; read on `src` only.
        group: defaults to all processes of the job.

    Returns:
        A `TensorDataset` in host memory if `dataset` is one or a subset of one: tensors are sent without
        pickle. Otherwise an `ItemDataset` of the items, which `src` has read, pickled and sent.

    Raises:
        InvalidRank: found locally, before anything is sent; so is an invalid `shuffle` or `seed`.
        InvalidArgument: on every rank: `src` has no data set, one without a length or with tensors that
            cannot be sent, or cannot read or pickle an item.

    Cost: every item is sent once. Beside the data and its own shard, `src` needs memory for one round: a
    few times 32 MiB (more if a single row per rank is larger), or 64 pickled items per rank.
    """
    check_flag(NAME, "shuffle", shuffle)
    check_seed(NAME, seed)
    group = group_or_world(group)
    is_src = group.rank == group.group_rank(NAME, "src", src)
    source, cause = _attempt(lambda: _Source(dataset, shuffle, seed) if is_src else None)
    offer = source.plan if isinstance(source, _Source) else source
    plan = _succeeded(broadcast_object(offer, src=src, group=group), src, cause)
    assert not isinstance(source, _Failure)
    return _Rounds(plan, source, src, group).receive()


class _Rounds:
    """The rounds in which the shards are sent; `source` is None on the other ranks."""

    def __init__(self, plan: _Plan, source: _Source | None, src: int, group: Group) -> None:
        self.plan = plan
        self._source = source
        self._src = src
        self._group = group
        sizes = split_evenly(plan.total, group.size)
        self._longest = sizes[0]
        self._size = sizes[group.rank]
        self._starts = [end - size for size, end in zip(sizes, accumulate(sizes), strict=True)]
        self._ends = list(accumulate(sizes))

    def receive(self) -> "Dataset[Any]":
        """Return this rank's shard."""
        if self.plan.columns is None:
            return ItemDataset(self._items())
        return TensorDataset(*(self._column(i, *spec) for i, spec in enumerate(self.plan.columns)))

    def _column(self, column: int, dtype: torch.dtype, row_shape: tuple[int, ...]) -> Tensor:
        """Receive this rank's rows of one tensor.

        Every rank receives as many rows as the longest shard has, since `scatter` sends equal sizes; a
        shorter shard drops the last row.
        """
        rows = torch.empty(self._longest, *row_shape, dtype=dtype)
        row_bytes = math.prod(row_shape) * dtype.itemsize * self._group.size
        step = max(1, ROUND_BYTES // max(1, row_bytes))
        for begin in range(0, self._longest, step):
            part = rows[begin : begin + step]
            scatter(part, self._slices(column, begin, len(part)), src=self._src, group=self._group)
        return rows[: self._size]

    def _slices(self, column: int, begin: int, count: int) -> list[Tensor] | None:
        if self._source is None:
            return None
        places = [start + begin for start in self._starts]
        return [self._source.tensor_rows(column, place, place + count) for place in places]

    def _items(self) -> list[Any]:
        """Receive this rank's items."""
        mine: list[Any] = []
        for begin in range(0, self._longest, ROUND_ITEMS):
            outcome, cause = _attempt(partial(self._payloads, begin))
            payloads = [outcome] * self._group.size if isinstance(outcome, _Failure) else outcome
            payload = scatter_object(payloads, src=self._src, group=self._group)
            mine += pickle.loads(_succeeded(payload, self._src, cause))
        return mine

    def _payloads(self, begin: int) -> list[bytes] | None:
        if self._source is None:
            return None
        places = [(start + begin, end) for start, end in zip(self._starts, self._ends, strict=True)]
        return [self._source.pickled_items(place, min(place + ROUND_ITEMS, end)) for place, end in places]
