"""`Communicator`: the messages between the ranks of a group, as those who do not know MPI see them."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Communicator", "DigestExchange", "GroupCommunicator", "Request"]


class Request(Protocol):
    """What a communicator has started: only it can tell whether that is complete. It has no methods."""


class Communicator(Protocol):
    """Ranks that can send each other messages, as core needs them."""

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

    def keep(self, memory: object) -> None:
        """Keep something until the process ends, where MPI may be in the middle of something in it."""

    def same_host(self) -> "Communicator":
        """Return a communicator of the ranks that can share memory with this one. Collective."""

    def free(self) -> None:
        """Give it back. Collective."""


class GroupCommunicator(Communicator, Protocol):
    """The communicator of a group's queue, as everything above core sees it.

    `mpisgd.transport.mpi.Communicator` is the real one, and tells more of each method. They take contiguous
    CPU tensors and ranks of the communicator. Whoever starts a request keeps its tensors till it is complete.

    Attributes:
        tag_limit: the largest tag.
        only_thread: the thread that alone may use it; None: all may. See `mpisgd.threads.calling_thread`.
    """

    tag_limit: int
    only_thread: int | None

    def duplicate(self, *, apart: bool = False) -> "GroupCommunicator":
        """Return one of its own over the same ranks. Collective, as all of the following.

        Args:
            apart: whether the loss of a rank leaves it to the others: what they send each other still comes,
                and so over all that are made of it.
        """

    def same_host(self) -> "GroupCommunicator":
        """Return one over the ranks that can share memory with this one."""

    def split(self, color: int) -> "GroupCommunicator":
        """Return one over the ranks that give the same `color`, ordered as here."""

    def subset(self, ranks: Sequence[int], *, apart: bool = False) -> "GroupCommunicator | None":
        """Return one over `ranks` in that order, None on the others."""

    def create_group(self, ranks: Sequence[int], tag: int, *, apart: bool = False) -> "GroupCommunicator":
        """Return one over `ranks` in the order given. Collective over them alone."""

    def is_revoked(self) -> bool:
        """Return whether a rank has revoked it, as far as is known here."""

    def revoke_family(self) -> None:
        """End what goes on over one that is apart, and over all that were made of it, on all their ranks."""

    # -- messages -----------------------------------------------------------------------------------

    def irecv(self, tensor: Tensor, src: int | None, tag: int = 0) -> Request:
        """Start receiving into `tensor` from `src`, None for whoever sends first."""

    def poll_one(self, request: Request) -> tuple[int, int] | None:
        """Return (source rank, bytes received) once `request` is complete, None before."""

    def cancel(self, request: Request, memory: object) -> None:
        """Cancel a receive; where a message for it is already coming in, `memory` is kept until it has."""

    def probe(self, tag: int | None = None) -> tuple[int, int, int] | None:
        """Return a message that waits to be received; `tag` None: of any tag."""

    def progress(self) -> None:
        """Let messages move along."""

    def persistent(self, send: bytearray, dst: int, recv: bytearray, src: int, tag: int) -> list[Request]:
        """Prepare an exchange of two small fixed buffers that is started again and again."""

    def start(self, requests: list[Request]) -> None:
        """Start a prepared exchange."""

    def release(self, requests: Sequence[Request]) -> None:
        """Free a prepared exchange that is over."""

    # -- collectives --------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy root's bytes into everyone's `tensor`."""

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        """Combine `tensor` [n] over the ranks, in place."""

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        """Combine `tensor` [n] over the ranks into root's; the others keep theirs."""

    def all_gather(self, out: Tensor, tensor: Tensor | None) -> None:
        """Put everyone's `tensor` [n] into `out` [size * n]; None: mine is already in its place there."""

    def all_gather_request(self, out: Tensor, tensor: Tensor) -> Request:
        """Start an all-gather of `tensor` [n] into `out` [size * n]."""

    def gather(self, out: Tensor | None, tensor: Tensor, root: int) -> None:
        """Put everyone's `tensor` [n] into root's `out` [size * n]."""

    def scatter(self, tensor: Tensor, source: Tensor | None, root: int) -> None:
        """Hand piece r of root's `source` [size * n] to rank r's `tensor` [n]."""

    def all_to_all(self, out: Tensor, tensor: Tensor) -> None:
        """Hand piece r of `tensor` [size * n] to rank r; piece s of `out` [size * n] comes from rank s."""

    def broadcast_object(self, obj: Any, root: int) -> Any:
        """Return root's object."""

    def gather_object(self, obj: Any, root: int) -> list[Any] | None:
        """Return everyone's object on root, None elsewhere."""

    def scatter_object(self, objs: Sequence[Any] | None, root: int) -> Any:
        """Return this rank's entry of root's list."""


class DigestExchange(Protocol):
    """How the ranks of a group learn the smallest and the largest of their digests. One at a time.

    Attributes:
        yield_s: where cores are scarce, for so long a rank that waits yields its core before it sleeps.
    """

    @property
    def yield_s(self) -> float:
        """See above."""
        return 0.0

    def start(self, digest: int) -> None:
        """Begin with this rank's digest."""

    def agree_soon(self) -> bool:
        """Go as far as is possible at once, or in a moment; return whether all have come with one digest."""

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
