"""A step's batch in micro-batches: parts of its rows, of the same size or one less."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.arguments import shown
from mpisgd.errors import InvalidArgument

__all__ = [
    "Batch",
    "RowSpec",
    "as_tensors",
    "joined",
    "num_rows_of",
    "row_counts",
    "spec_of",
    "split_rows",
    "split_targets",
]

Tensors = tuple[Tensor, ...]
RowSpec = tuple[tuple[tuple[int, ...], str], ...]  # shape of a row and dtype, of each tensor


class Batch(NamedTuple):
    """A step's batch, as far as this rank has it.

    Attributes:
        first: the number of its first micro-batch.
        counts: rows of each micro-batch.
        inputs: by micro-batch; empty on ranks that have not the first stage.
        targets: by micro-batch; empty on ranks that have not the last stage.
        trains: whether gradients are wanted.
    """

    first: int
    counts: Sequence[int]
    inputs: Sequence[Tensors]
    targets: Sequence[Any]
    trains: bool = True

    def rows(self, micro_batch: int) -> int:
        """Return the number of rows of a micro-batch."""
        return self.counts[micro_batch - self.first]

    def share(self, micro_batch: int) -> float:
        """Return the share of the batch's rows that a micro-batch has."""
        return self.rows(micro_batch) / sum(self.counts)


def row_counts(num_rows: int, num_micro_batches: int) -> list[int]:
    """Return how many rows each micro-batch has; the first ones have one more where they cannot be equal.

    Raises:
        InvalidArgument: there are fewer rows than micro-batches.
    """
    if num_rows < num_micro_batches:
        raise InvalidArgument(
            f"pipeline: a batch of {num_rows} rows for num_micro_batches={num_micro_batches}; each needs one"
        )
    least, more = divmod(num_rows, num_micro_batches)
    return [least + (number < more) for number in range(num_micro_batches)]


def as_tensors(what: str, value: Any) -> Tensors:
    """Return a user's inputs or targets as a tuple of tensors.

    Raises:
        InvalidArgument: it is something else, or the tensors have different numbers of rows.
    """
    tensors = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not tensors or not all(isinstance(tensor, Tensor) and tensor.dim() for tensor in tensors):
        raise InvalidArgument(
            f"pipeline: {what}={shown(value)}; expected a tensor whose first dimension is the batch, or "
            "several"
        )
    if len({len(tensor) for tensor in tensors}) > 1:
        raise InvalidArgument(
            f"pipeline: {what} have {[len(tensor) for tensor in tensors]} rows; expected as many in each"
        )
    return tensors


def num_rows_of(tensors: Tensors) -> int:
    """Return the number of rows."""
    return len(tensors[0])


def spec_of(tensors: Tensors) -> RowSpec:
    """Return the shapes without rows, dtypes and devices, which must stay the same from step to step."""
    return tuple((tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in tensors)


def split_rows(tensors: Tensors, counts: Sequence[int]) -> list[Tensors]:
    """Return the tensors of each micro-batch: views of their rows."""
    parts = [torch.split(tensor, list(counts)) for tensor in tensors]
    return list(zip(*parts, strict=True))


def split_targets(targets: Any, counts: Sequence[int]) -> list[Any]:
    """Return the targets of each micro-batch, a tensor where one was given."""
    parts = split_rows(as_tensors("targets", targets), counts)
    return list(parts) if isinstance(targets, (tuple, list)) else [part[0] for part in parts]


def joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs of micro-batches as those of the batch; None where there are none."""
    if not outputs:
        return None
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs))
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
