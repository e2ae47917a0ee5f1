"""What core asks of the rooms above it, which give it these; it imports none of them.

A group hands its transports on as they are, and whoever uses them (the collectives, the gradients) knows
their own types, so what core does not use itself is typed `Any`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

__all__ = ["Communicator", "DigestExchange", "Job"]


class Communicator(Protocol):
    """Ranks that can send each other messages; `mpisgd.transport.mpi.Communicator` is the real one."""

    rank: int
    size: int
    global_ranks: tuple[int, ...]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order. Collective."""

    def barrier_request(self) -> Any:
        """Start a barrier that does not block; return its request. Collective."""

    def poll(self, requests: Sequence[Any]) -> bool:
        """Return whether all requests are complete; asking moves them along."""

    def isend(self, tensor: Any, dst: int, tag: int = 0) -> Any:
        """Start sending a tensor to a rank; return the request."""

    def probe(self, tag: int) -> Any:
        """Return what is known of a message of this tag that waits to be received, None if there is none."""

    def abandon(self, requests: Sequence[Any], memory: object) -> None:
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


class Job(Protocol):
    """What is asked of a group's job; `mpisgd.job.world.Job` is the real one, which explains it."""

    timeout_s: float
    threads_allowed: bool
    gpu: str
    at_end: list[Callable[[], None]]

    @property
    def world(self) -> Any:
        """The group of all ranks."""

    @property
    def monitor(self) -> Any:
        """Tells what the other ranks are doing; None where the ranks are threads of one process."""

    @property
    def groups(self) -> list[Any]:
        """The groups that this rank knows of and has not closed."""

    @property
    def names(self) -> Iterator[int]:
        """Numbers of the groups without a name."""

    def add(self, group: Any) -> None:
        """Add a group."""
