"""`SmallSum`: adds up a small message of every rank of a host in one call."""

import contextvars
import ctypes
from collections.abc import Sequence
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
    addresses: Sequence[Sequence[int]], numel: int, dtype: torch.dtype
) -> "Sequence[SmallSum | None]":
    """Return for each turn the sum of [numel] at every rank's address; None where torch is to add it up."""
    fits = KEEPS_SETTINGS_IN_CONTEXTS and dtype in NUMPY_DTYPES and 0 < numel * dtype.itemsize <= MAX_BYTES
    return [SmallSum.of(everyones, numel, dtype) if fits else None for everyones in addresses]


class SmallSum:
    """The messages of all ranks as the rows of a matrix, which numpy adds up in their order.

    The bits are those of `combine_in_rank_order`.

    Attributes:
        add: adds up.
        address: where the sum lies until the next one is taken.
    """

    def __init__(self, rows: "np.ndarray[tuple[int, int], np.dtype[np.generic]]") -> None:
        total = np.empty(rows.shape[1], rows.dtype)
        self.address: int = total.ctypes.data
        # numpy warns of overflow and NaN; torch does not, and what lies beside a single number may be any
        # bytes. A context costs a tenth of `np.errstate`.
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        in_silence: Any = context.run
        if len(rows) == 2:  # a third of the time of `reduce`
            self.add = partial(in_silence, np.add, rows[0], rows[1], total)
        else:
            self.add = partial(in_silence, np.add.reduce, rows, 0, None, total)

    @classmethod
    def of(cls, addresses: Sequence[int], numel: int, dtype: torch.dtype) -> "SmallSum | None":
        """Return the sum of what lies there; None where it does not lie at equal distances."""
        step = addresses[1] - addresses[0]
        if step <= 0 or list(addresses) != list(range(addresses[0], addresses[-1] + 1, step)):
            return None
        columns, of = max(numel, MIN_COLUMNS), np.dtype(NUMPY_DTYPES[dtype])
        nbytes = addresses[-1] - addresses[0] + columns * of.itemsize
        memory = memoryview((ctypes.c_byte * nbytes).from_address(addresses[0])).cast("B")
        return cls(np.ndarray((len(addresses), columns), of, memory, 0, (step, of.itemsize)))
