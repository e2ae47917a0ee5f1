"""`Framework`: what a framework's process does for its rank."""

import abc
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its type stubs forget it

from mpisgd.bench.measure import Variant
from mpisgd.core.topology import Topology

__all__ = ["Framework", "Rendezvous"]

JOIN_LIMIT_S = 60.0


class Rendezvous(NamedTuple):
    """What a process must know to find the others.

    Attributes:
        topology: of the job; the process has the rank of the one it belongs to.
        address: where rank 0 serves a store.
        port: of that.
    """

    topology: Topology
    address: str
    port: int

    def store(self) -> TCPStore:
        """Return the store, which limits how long processes wait for each other."""
        return TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=JOIN_LIMIT_S))


class Framework(abc.ABC):
    """Another framework, in a process of its own for each rank."""

    def __init__(self) -> None:
        self._variants: dict[str, Variant] = {}

    @abc.abstractmethod
    def version(self) -> str:
        """Return what it is called in the record."""

    @abc.abstractmethod
    def join(self, rendezvous: Rendezvous) -> None:
        """Meet the others."""

    @abc.abstractmethod
    def make(self, task: Any) -> Variant:
        """Return what does `task`: a `Case` or a `StepTask`."""

    def check(self, name: str, task: Any) -> None:
        """Make the variant `name`, and check it; see `Variant`."""
        self._variants[name] = self.make(task)
        self._variants[name].check()

    def time(self, name: str, calls: int) -> float:
        """See `Variant`."""
        return self._variants[name].time(calls)

    def release(self, name: str) -> None:
        """Give the memory of a variant back, if there is one."""
        if variant := self._variants.pop(name, None):
            variant.release()
