"""`SmallSum`: adds up a small message of every rank of a host in one call."""

import contextvars
import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["SmallSum", "small_sums"]

# From so many ranks on numpy adds up small messages: torch needs a call for each rank, of a microsecond.
FROM_RANKS = 3
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
    known = KEEPS_SETTINGS_IN_CONTEXTS and dtype in NUMPY_DTYPES and 0 < numel * dtype.itemsize <= MAX_BYTES
    fits = known and len(addresses[0]) >= FROM_RANKS
    return [SmallSum.of(everyones, numel, dtype) if fits else None for everyones in addresses]


class SmallSum:
    """The messages of all ranks as the rows of a matrix, which numpy adds up in their order.

    The bits are those of `combine_in_rank_order`.
    """

    def __init__(self, rows: "np.ndarray[tuple[int, int], np.dtype[np.generic]]") -> None:
        self._rows = rows
        self._total = np.empty(rows.shape[1], rows.dtype)
        self._address = self._total.ctypes.data
        # numpy warns of overflow and NaN; torch does not, and what lies beside a single number may be any
        # bytes. A context costs a tenth of `np.errstate`.
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        self._in_silence: Any = context.run

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

    def address(self) -> int:
        """Add up, and return where the sum lies until the next one is taken."""
        self._in_silence(np.add.reduce, self._rows, 0, None, self._total)
        return self._address
