"""A communicator for tests that waits asleep: MPI waits on a core, which others could use meanwhile."""

from __future__ import annotations

import time
from typing import Any

from mpi4py import MPI

__all__ = ["ProcessReferee"]

FIRST_S, MOST_S = 5e-5, 2e-3


class ProcessReferee(MPI.Intracomm):
    """Collective operations of ranks that are processes, once all have come."""

    def allgather(self, obj: Any) -> list[Any]:
        self._wait_for_all()
        found: list[Any] = super().allgather(obj)
        return found

    def bcast(self, obj: Any, root: int = 0) -> Any:
        self._wait_for_all()
        return super().bcast(obj, root)

    def barrier(self) -> None:
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        arrived, pause_s = self.Ibarrier(), FIRST_S
        while not arrived.Test():
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, MOST_S)

    Barrier = barrier
