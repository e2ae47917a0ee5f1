"""Partition a data set into disjoint random parts, the same on every rank without communication.

`apportion` and `split_evenly` are the arithmetic: how many items each part gets.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from mpisgd.arguments import check_seed, shown
from mpisgd.errors import InvalidArgument

__all__ = ["apportion", "partition", "split_evenly"]

T_co = TypeVar("T_co", covariant=True)

SUM_TOLERANCE = 1e-9


def split_evenly(total: int, num_parts: int) -> list[int]:
    """Return `num_parts` sizes that sum to `total` and differ by at most one, the larger first."""
    if total < 0 or num_parts < 1:
        raise InvalidArgument(f"cannot split {total} items into {num_parts} parts")
    size, larger = divmod(total, num_parts)
    return [size + (part < larger) for part in range(num_parts)]


def apportion(total: int, fractions: Sequence[float]) -> list[int]:
    """Return sizes that sum to `total`, each less than one item from its exact share.

    Shares are rounded down; the items left over go to the largest remainders, the first on a tie. A
    fraction of zero gets nothing.

    Raises:
        InvalidArgument: a negative total, a fraction that is negative or not a number, or fractions that
            do not sum to 1 within 1e-9.
    """
    if total < 0:
        raise InvalidArgument(f"cannot apportion {total} items")
    _check_fractions(fractions)
    # Rational arithmetic: 0.29 * 100 is 28.999... in floating point, and a sum that is 1e-10 off would
    # lose an item of a very large data set.
    whole = sum(map(Fraction, fractions))
    exact = [Fraction(fraction) * total / whole for fraction in fractions]
    sizes = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: sizes[part] - exact[part])
    for part in by_remainder[: total - sum(sizes)]:
        sizes[part] += 1
    return sizes


def partition(dataset: Dataset[T_co], fractions: Sequence[float], *, seed: int = 0) -> list[Subset[T_co]]:
    """Split `dataset` at random into disjoint parts that cover it.

    The same on every rank for the same seed; torch's global random state is neither used nor changed.

    Args:
        dataset: map-style, with a length.
        fractions: one per part; they sum to 1, such as `[0.8, 0.2]`, or `[1 / n] * n` for a part per rank.
        seed: chooses the shuffle.

    Raises:
        InvalidArgument: a dataset without a length, or fractions that `apportion` refuses.
    """
    check_seed("partition", seed)
    total = length_of(dataset, "partition")
    sizes = apportion(total, fractions)
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    ends = list(accumulate(sizes))
    return [Subset(dataset, shuffled[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def length_of(dataset: Dataset[Any], caller: str) -> int:
    """Return the length of a map-style data set.

    Raises:
        InvalidArgument: it has none, or no items by index.
    """
    kind = type(dataset)
    by_index = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    if isinstance(dataset, IterableDataset) or not by_index:
        raise InvalidArgument(
            f"{caller}: {kind.__name__} has no length or no items by index; give as dataset a map-style one, "
            "which has __len__ and __getitem__"
        )
    return len(dataset)  # type: ignore[arg-type]  # it has one


def _check_fractions(fractions: Sequence[float]) -> None:
    if isinstance(fractions, (str, bytes)) or not isinstance(fractions, Sequence):
        raise InvalidArgument(f"fractions is a {type(fractions).__name__}; expected a list of numbers")
    for part, fraction in enumerate(fractions):
        if not isinstance(fraction, (int, float, Fraction)) or not 0 <= fraction < math.inf:
            raise InvalidArgument(f"fraction {part} is {shown(fraction)}; expected 0 to 1")
    if abs(math.fsum(fractions) - 1) > SUM_TOLERANCE:
        raise InvalidArgument(f"fractions {list(fractions)} sum to {math.fsum(fractions):.10g}, not to 1")
