"""`Framework`: what a framework's process does for its rank."""

from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its type stubs forget it

from mpisgd.core.topology import Topology
from mpisgd.tools.bench.measure import Variant
from mpisgd.tools.bench.report.rows import ONE_PROCESS

__all__ = ["BESIDE", "FRAMEWORKS", "REFERENCES", "Framework", "Rendezvous"]

# Where each is to be found; imported in its own process only.
FRAMEWORKS = {
    "gloo": "mpisgd.tools.bench.peers.gloo:Gloo",
    "nccl": "mpisgd.tools.bench.peers.gloo:Nccl",
    "horovod": "mpisgd.tools.bench.peers.horovod:Horovod",
}

# torch alone. What the C library does with freed memory holds for a whole process, so each has its own.
BESIDE = "torch, not kept"
REFERENCES = {
    BESIDE: "mpisgd.tools.bench.peers.alone:Alone",
    ONE_PROCESS[0]: "mpisgd.tools.bench.peers.alone:AloneKept",
    ONE_PROCESS[1]: "mpisgd.tools.bench.peers.alone:Alone",
}

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


class Framework(Protocol):
    """Another framework, in a process of its own for each rank; its constructor meets the others.

    Attributes:
        version: what it is called in the record.
    """

    version: str

    def make(self, task: Any) -> Variant:
        """Return functions that run `task`: a `Case` or a `StepTask`."""
