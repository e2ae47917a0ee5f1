"""`Transfer`: one announced message on one of its two ranks: by NCCL, or through host memory after all."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from mpisgd.accelerator.buffers import StagedOutput, in_order, readable
from mpisgd.accelerator.runtime import runtime
from mpisgd.errors import MpisgdError
from mpisgd.interfaces.communicator import GroupCommunicator, Request
from mpisgd.transport.device.nccl import NcclWork

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["Incoming", "Outgoing", "Transfer"]


class Owner(Protocol):
    """`DeviceMessages`, as its transfers see it."""

    group: "Group"
    communicator: GroupCommunicator
    data_tag: int
    lock: Any

    def progress(self) -> None:
        """Do what the other ends have said."""


class Transfer:
    """See the module. All but `poll` is done with the lock of its owner held.

    Args:
        messages: of the group.
        number: of the announcement.
        peer: the group rank of the other end.
        tensor: of the program.
        ready: the event after which the tensor may be touched; None: it lies on the host.

    Attributes:
        begun: the operation of NCCL, once it was launched.
        error: why the message does not come.
        stream: where its future's value is made; None for a tensor on the host.
    """

    def __init__(self, messages: Owner, number: int, peer: int, tensor: Tensor, ready: Any) -> None:
        self.number, self.peer, self.ready = number, peer, ready
        self.tensors = [tensor]
        self.nbytes = tensor.numel() * tensor.element_size()
        self.begun: NcclWork | None = None
        self.error: MpisgdError | None = None
        self.stream = None if ready is None else messages.group.streams.get("results", tensor.device)
        self._messages = messages
        self._request: Request | None = None
        self._staged: Tensor | None = None  # what MPI sends, or receives into

    @property
    def tensor(self) -> Tensor:
        """The program's."""
        return self.tensors[0]

    @property
    def requests(self) -> list[Request]:
        """What MPI has to do with it."""
        return [] if self._request is None else [self._request]

    def memory_on_device(self) -> tuple[Tensor, Callable[[], None]]:
        """Return contiguous [numel] on the device, and what follows there once NCCL is through."""
        raise NotImplementedError

    def by_host(self) -> None:
        """Let MPI move it through host memory."""
        raise NotImplementedError

    def poll(self) -> tuple[int, int] | None:
        """Return (source rank, bytes) once nobody's host has to wait any more, None before.

        Raises:
            ShapeMismatch: the ends have tensors of different sizes.
            NcclFailed: NCCL cannot move it.
        """
        self._messages.progress()
        with self._messages.lock:
            if self.error is not None:
                raise self.error
            if self.begun is not None:
                return self.peer, self.nbytes
            if self._request is None:
                return None
            return self._messages.communicator.poll_one(self._request)


class Outgoing(Transfer):
    """A message from this rank."""

    def __init__(self, messages: Owner, number: int, peer: int, tensor: Tensor) -> None:
        self._flat = in_order(tensor)
        ready = runtime().current_stream(tensor.device).record_event()
        super().__init__(messages, number, peer, tensor, ready)

    def memory_on_device(self) -> tuple[Tensor, Callable[[], None]]:
        """See `Transfer`."""
        return self._flat, lambda: None

    def by_host(self) -> None:
        """Copy it to the host, and send that."""
        stream = self._messages.group.streams.get("messages", self.tensor.device)
        with runtime().on(stream):
            stream.wait_event(self.ready)
            self._staged = readable(self._flat)
        self._request = self._messages.communicator.isend(self._staged, self.peer, self._messages.data_tag)


class Incoming(Transfer):
    """A message to this rank.

    Args:
        messages: see `Transfer`, as for the rest.
        staged: host memory that it may arrive in.
    """

    def __init__(
        self,
        messages: Owner,
        number: int,
        peer: int,
        tensor: Tensor,
        ready: Any,
        staged: Tensor,
    ) -> None:
        super().__init__(messages, number, peer, tensor, ready)
        self._staged = staged

    def memory_on_device(self) -> tuple[Tensor, Callable[[], None]]:
        """See `Transfer`."""
        output = StagedOutput(self.tensor, keep=False, at_home=True)
        return output.flat, output.copy_back

    def by_host(self) -> None:
        """Receive what the sender copies to its host."""
        assert self._staged is not None
        self._request = self._messages.communicator.irecv(self._staged, self.peer, self._messages.data_tag)
