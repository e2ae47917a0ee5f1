"""What core asks of the rooms above it, which give it these; it imports none of them."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Communicator", "DigestExchange", "Request"]


class Request(Protocol):
    """What a communicator has started: only it can tell whether that is complete. It has no methods."""


class Communicator(Protocol):
    """Ranks that can send each other messages; `mpisgd.transport.mpi.Communicator` is the real one."""

    rank: int
    size: int
    global_ranks: tuple[int, ...]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order. Collective."""

    def barrier_request(self) -> Request:
        """Start a barrier that does not block; return its request. Collective."""

    def poll(self, requests: Sequence[Request]) -> bool:
        """Return whether all requests are complete; asking moves them along."""

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Request:
        """Start sending a tensor to a rank; return the request."""

    def probe(self, tag: int) -> tuple[int, int, int] | None:
        """Return (source rank, tag, bytes) of a message that waits to be received, None if there is none."""

    def abandon(self, requests: Sequence[Request], memory: object) -> None:
        """Give requests up; their memory is kept as long as MPI may use it."""

    def same_host(self) -> "Communicator":
        """Return a communicator of the ranks that can share memory with this one. Collective."""

    def free(self) -> None:
        """Give it back. Collective."""


class DigestExchange(Protocol):
    """How the ranks of a group learn the smallest and the largest of their digests. One at a time."""

    def start(self, digest: int) -> None:
        """Begin with this rank's digest."""

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest, once it is over."""

    def sleep(self, limit_s: float) -> bool:
        """Sleep for so long, or until another rank wakes this one; False at once where none would."""

    def missing(self) -> str:
        """Describe the ranks that this rank waits for, while it is not over."""

    def close(self) -> None:
        """Free what MPI keeps for it; before the communicator is freed."""
