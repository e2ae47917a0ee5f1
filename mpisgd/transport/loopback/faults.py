"""`Loss` and `Fault`: what a run is told to let happen, and `Faults`, which counts until it does."""

import errno
import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mpisgd.threads.fault_points import ALLOCATE, WRITE

__all__ = ["Fault", "Faults", "Loss"]


class Loss(NamedTuple):
    """A loss of ranks: of one, or of those of a host.

    Attributes:
        ranks: of the job at its start; all are lost at once.
        at: when one of them comes to that many waits and messages.
    """

    ranks: tuple[int, ...]
    at: int


class Fault(NamedTuple):
    """Something of a rank that fails.

    Attributes:
        kind: one of `mpisgd.threads.fault_points`: an allocation of memory that a host shares, a write, an
            fsync or a renaming of a checkpoint.
        rank: of the job at its start.
        at: which one of its kind, counted from 1.
        lasts: how many after it fail, too.
        is_short: a write takes half of its bytes, and the next one fails.
    """

    kind: str
    rank: int
    at: int
    lasts: int = 0
    is_short: bool = False


class Faults:
    """The faults of a run.

    Args:
        faults: which there are.

    Attributes:
        happened: those that have.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.happened: list[Fault] = []
        self._faults = faults
        self._counts: Counter[tuple[str, int]] = Counter()

    def at_point(self, kind: str, rank: int, nbytes: int) -> int:
        """Return how many of `nbytes` are written.

        Raises:
            OSError: it fails.
        """
        self._counts[kind, rank] += 1
        number = self._counts[kind, rank]
        for fault in self._faults:
            if (fault.kind, fault.rank) == (
                kind,
                rank,
            ) and 0 <= number - fault.at <= fault.lasts + fault.is_short:
                self.happened.append(fault)
                if fault.is_short and number == fault.at and nbytes > 1:
                    return nbytes // 2
                code = errno.ENOMEM if kind == ALLOCATE else errno.ENOSPC if kind == WRITE else errno.EIO
                raise OSError(code, os.strerror(code))
        return nbytes
