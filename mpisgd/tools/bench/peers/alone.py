"""torch without communication, in processes of its own: as it is without mpisgd, and with kept memory."""

from typing import Any

import torch

from mpisgd.job.malloc_settings import describe, keep_freed_memory
from mpisgd.tools.bench.measure import Timed, Unavailable, Variant
from mpisgd.tools.bench.peers.framework import Rendezvous
from mpisgd.tools.bench.training import Training

__all__ = ["Alone", "AloneKept"]


class Alone:
    """See `Framework`. What the C library does with freed memory is left alone."""

    version = f"torch {torch.__version__}"

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rank = rendezvous.topology.rank

    def make(self, task: Any) -> Variant:
        """See `Framework`; the ranks start together, since each has just been told of the turn before."""
        training = Training(task, self._rank)
        return Timed("torch", training.step, training, start=lambda: None)


class AloneKept(Alone):
    """See `Framework`. The C library keeps freed memory, as it does for a rank."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(rendezvous)
        keep_freed_memory(True)
        if not describe().startswith("kept"):
            raise Unavailable(f"freed memory: {describe()}")
