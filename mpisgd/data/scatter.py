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


class _Source:
    """The data set on the source rank: item i is `base[rows[i]]`."""

    def __init__(self, dataset: "Dataset[Any] | None", shuffle: bool, seed: int) -> None:
        if dataset is None:
            raise InvalidArgument("the data set is None on the rank that should have it; is src right?")
        self.base, self.rows = _flattened(dataset)
        if shuffle:
            generator = torch.Generator().manual_seed(seed)
            self.rows = self.rows[torch.randperm(len(self.rows), generator=generator)]
        given = self.base.tensors if type(self.base) is TensorDataset else ()
        self.tensors = [check_tensor(NAME, tensor, f"tensor {i}").detach() for i, tensor in enumerate(given)]

    @property
    def plan(self) -> _Plan:
        columns = tuple((tensor.dtype, tuple(tensor.shape[1:])) for tensor in self.tensors)
        return _Plan(len(self.rows), columns or None)

    def tensor_rows(self, column: int, start: int, count: int) -> Tensor:
        """Return `count` rows of one tensor from `start` on; beyond the end, the last row."""
        wanted = torch.arange(start, start + count).clamp(max=len(self.rows) - 1)
        return self.tensors[column][self.rows[wanted]].cpu()

    def pickled_items(self, start: int, stop: int) -> bytes:
        """Return a pickled list of the items `start` to `stop`."""
        file = io.BytesIO()
        items = [self._item(row) for row in self.rows[start:stop].tolist()]
        _ItemPickler(file, pickle.HIGHEST_PROTOCOL).dump(items)
        return file.getvalue()

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


class _ItemPickler(pickle.Pickler):
    """Pickles a slice of a tensor without the rest of its storage, which torch would include."""

    def reducer_override(self, obj: Any) -> Any:
        strided = type(obj) is Tensor and obj.layout is torch.strided
        if strided and obj.untyped_storage().nbytes() > obj.nbytes:
            return obj.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _attempt(make: Callable[[], T], src: int) -> T | InvalidArgument:
    """Return the result of `make`, or the error that all ranks shall raise, to be sent in its place."""
    try:
        return make()
    except Exception as exc:
        text = str(exc) if isinstance(exc, MpisgdError) else f"{type(exc).__name__}: {exc}"
        error = InvalidArgument(f"{NAME}: rank {src}: {text.removeprefix(f'{NAME}: ')}")
        error.on_every_rank = True
        error.__cause__ = exc  # known on `src` only
        return error


def _result(outcome: T | InvalidArgument) -> T:
    """Return the result of an attempt, or raise its error."""
    if isinstance(outcome, InvalidArgument):
        raise outcome
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
        InvalidArgument: on every rank: `src` has no data set, a data set without a length or with tensors
            that cannot be sent, or an item that cannot be read or pickled.

    Cost: every item is sent once. Beside the data and its own shard, `src` needs memory for one round: a
    few times 32 MiB (more if a single row per rank is larger), or 64 pickled items per rank.
    """
    check_flag(NAME, "shuffle", shuffle)
    check_seed(NAME, seed)
    group = group_or_world(group)
    is_src = group.rank == group.group_rank(NAME, "src", src)
    source = _attempt(lambda: _Source(dataset, shuffle, seed) if is_src else None, src)
    offer = source.plan if isinstance(source, _Source) else source
    plan = _result(broadcast_object(offer, src=src, group=group))
    return _Rounds(plan, _result(source), src, group).receive()


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
            parts: list[Tensor] | None = None
            if self._source is not None:
                places = (start + begin for start in self._starts)
                parts = [self._source.tensor_rows(column, place, len(part)) for place in places]
            scatter(part, parts, src=self._src, group=self._group)
        return rows[: self._size]

    def _items(self) -> list[Any]:
        """Receive this rank's items."""
        mine: list[Any] = []
        for begin in range(0, self._longest, ROUND_ITEMS):
            outcome = _attempt(partial(self._payloads, begin), self._src)
            if isinstance(outcome, InvalidArgument):
                scatter_object([outcome] * self._group.size, src=self._src, group=self._group)
                raise outcome
            payload = scatter_object(outcome, src=self._src, group=self._group)
            mine += pickle.loads(_result(payload))
        return mine

    def _payloads(self, begin: int) -> list[bytes] | None:
        if self._source is None:
            return None
        places = [(start + begin, end) for start, end in zip(self._starts, self._ends, strict=True)]
        return [self._source.pickled_items(place, min(place + ROUND_ITEMS, end)) for place, end in places]
