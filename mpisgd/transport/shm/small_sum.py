"""`SmallSum`: adds up a small message of every rank of a host in one call."""

import contextvars
import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

__all__ = ["SmallSum", "small_sums"]

# numpy adds up small messages: torch needs a call for each rank, of a microsecond.
MAX_BYTES = 2**13
KEEPS_SETTINGS_IN_CONTEXTS = int(np.__version__.partition(".")[0]) >= 2
NUMPY_DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
}
# Of a single column numpy adds up halves; of several it adds row after row.
MIN_COLUMNS = 2


def small_sums(
    addresses: Sequence[Sequence[int]], numel: int, dtype: torch.dtype, *, averages: bool
) -> "Sequence[SmallSum | None]":
    """Return for each turn the sum of [numel] at every rank's address; None where torch is to add it up.

    Args:
        addresses: for each turn, of every rank.
        numel: of each rank's message.
        dtype: of the elements.
        averages: whether the sum is divided by the number of ranks.
    """
    fits = KEEPS_SETTINGS_IN_CONTEXTS and dtype in NUMPY_DTYPES and 0 < numel * dtype.itemsize <= MAX_BYTES
    fits &= dtype.is_floating_point or not averages
    return [SmallSum.of(everyones, numel, dtype, averages) if fits else None for everyones in addresses]


class SmallSum:
    """The messages of all ranks as the rows of a matrix, which numpy adds up in their order.

    The bits are those of `combine_in_rank_order`.

    Attributes:
        add: adds up, and divides where it averages.
        address: where the sum lies until the next one is taken.
    """

    def __init__(self, rows: Any, averages: bool) -> None:
        total = np.empty(rows.shape[1], rows.dtype)
        self.address: int = total.ctypes.data
        # numpy warns of overflow and NaN; torch does not, and what lies beside a single number may be any
        # bytes. A context costs a tenth of `np.errstate`.
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        if len(rows) == 2:  # a third of the time of `reduce`
            add: Callable[[], Any] = partial(np.add, rows[0], rows[1], total)
        else:
            add = partial(np.add.reduce, rows, 0, None, total)
        if averages:
            add = partial(_in_turn, add, partial(np.divide, total, rows.dtype.type(len(rows)), total))
        self.add: Callable[[], Any] = partial(context.run, add)

    @classmethod
    def of(
        cls, addresses: Sequence[int], numel: int, dtype: torch.dtype, averages: bool
    ) -> "SmallSum | None":
        """Return the sum of what lies there; None where it does not lie at equal distances."""
        step = addresses[1] - addresses[0]
        if step <= 0 or list(addresses) != list(range(addresses[0], addresses[-1] + 1, step)):
            return None
        columns, of = max(numel, MIN_COLUMNS), np.dtype(NUMPY_DTYPES[dtype])
        nbytes = addresses[-1] - addresses[0] + columns * of.itemsize
        memory = memoryview((ctypes.c_byte * nbytes).from_address(addresses[0])).cast("B")
        return cls(np.ndarray((len(addresses), columns), of, memory, 0, (step, of.itemsize)), averages)


def _in_turn(*calls: Callable[[], Any]) -> None:
    for call in calls:
        call()
