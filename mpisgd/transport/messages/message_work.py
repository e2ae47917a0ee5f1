"""`MessageWork`: one message in flight, by MPI or, where it was announced, as its `Transfer` brings it."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mpisgd import tracing
from mpisgd.accelerator.runtime import runtime
from mpisgd.core.work import CompletableWork
from mpisgd.errors import CollectiveTimeout, MpisgdError, NotInitialized, ShapeMismatch
from mpisgd.interfaces.communicator import GroupCommunicator, Request
from mpisgd.threads.wait_registry import Message, WaitReason
from mpisgd.threads.waiting import Backoff
from mpisgd.transport.messages.announcement import announced_in

__all__ = ["InFlight", "MessageWork", "Transfer"]


class InFlight(NamedTuple):
    """What a rank tells the others of a group at its end.

    Attributes:
        messages: of this rank's that are in flight.
        num_sent: how many it has ever sent to each global rank: a send may be over where nothing has arrived.
    """

    messages: Sequence[Message] = ()
    num_sent: Mapping[int, int] = MappingProxyType({})


class Transfer(Protocol):
    """How an announced message comes.

    Attributes:
        nbytes: of its tensor.
        begun: the work on a device that brings it, once that is launched.
        stream: where its future's value is made, on a device.
        requests: what MPI has to do with it.
    """

    nbytes: int
    begun: Any
    stream: Any

    @property
    def requests(self) -> list[Request]:
        """See above."""

    def poll(self) -> tuple[int, int] | None:
        """Return (source rank, bytes) once no host has to wait any more, None before."""


class Messages(Protocol):
    """`PointToPoint`, as its messages see it."""

    communicator: GroupCommunicator
    elsewhere: Any
    timeout_s: float
    num_received: Counter[int]

    @property
    def is_watching_here(self) -> bool:
        """Whether this thread is the one that completes the watched messages."""

    def has_received(self, src: int) -> None:
        """Note that a message has come from group rank `src`."""

    def release(self, work: "MessageWork") -> None:
        """Forget a message that is done."""

    def watch(self, work: "MessageWork") -> None:
        """See to it that `work` ends without anyone waiting for it."""


class MessageWork(CompletableWork):
    """One message in flight.

    Attributes:
        message: which ranks are at the other end.
        source: group rank it came from, once it is done (None for a message sent).
        ready: see `PointToPoint.receive`.
    """

    def __init__(
        self,
        point_to_point: Messages,
        name: str,
        message: Message,
        request: Request,
        memory: tuple[Tensor, Any],
        arrived: Callable[[int], None] | None,
        *,
        ready: Any = None,
        transfer: Transfer | None = None,
    ) -> None:
        super().__init__(name, memory[1])
        self.ready = ready
        self._transfer = transfer
        if transfer is not None:
            self.stream = transfer.stream
        self.source: int | None = None
        self.is_receive = arrived is not None
        self.message = message
        self._point_to_point = point_to_point
        self._request = request
        self._memory = memory
        self._arrived = arrived
        self._started_ns = 0 if tracing.sink is None else time.monotonic_ns()

    @property
    def memory(self) -> Tensor:
        """What MPI sends, or receives into."""
        return self._memory[0]

    @property
    def _begun(self) -> Any:
        """The work on a device that brings the message; None where MPI does, or has not been told yet."""
        return None if self._transfer is None else self._transfer.begun

    def is_completed(self) -> bool:
        """Return whether the message is through; asking moves it along."""
        return self.is_through() and (self._begun is None or self._begun.is_completed())

    def is_through(self) -> bool:
        """Return whether the host need not wait for it any more; a device may have to bring it yet."""
        with self._lock:
            if not self._done:
                self._ask()
            return self._done

    @property
    def error(self) -> BaseException | None:
        """The error with which the operation has failed; None while it runs, and if it has succeeded."""
        return self._begun.error if self._error is None and self._begun is not None else self._error

    def _ask(self) -> None:
        error: Exception | None = None
        try:
            outcome = self._outcome()
            if outcome is None:
                return
            if self._arrived is not None and self._begun is None:
                self._arrived(outcome[1])
        except Exception as exc:  # whatever it is: who polls may be no one that waits for this message
            error = exc
        self.complete(error)

    def _outcome(self) -> tuple[int, int] | None:
        """Return (source rank, bytes) once the message is through, None before."""
        communicator, point_to_point = self._point_to_point.communicator, self._point_to_point
        if self._transfer is not None:
            return self._transfer.poll() if communicator.poll([self._request]) else None
        try:
            outcome = communicator.poll_one(self._request)
        except ShapeMismatch as exc:
            raise ShapeMismatch(f"{exc:s}, which has {self.memory.nbytes}") from exc
        if outcome is None or self._arrived is None:
            return outcome
        self.source, nbytes = outcome
        point_to_point.has_received(self.source)
        if point_to_point.elsewhere is None or (found := announced_in(self.memory, nbytes)) is None:
            return outcome
        self._transfer = point_to_point.elsewhere.receive(self, found, self.source)
        return None

    def complete(self, error: BaseException | None) -> None:
        """Mark the message as over; the group need not hold it any longer."""
        self._point_to_point.release(self)
        if self._started_ns and tracing.sink is not None:
            phase = (self.name, self._started_ns, time.monotonic_ns())
            args = {"bytes": self.memory.nbytes if self._transfer is None else self._transfer.nbytes}
            tracing.sink.overlapping("message", f"message {id(self)}", [phase], args)
        super().complete(error)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the message is through."""
        backoff = Backoff(
            self._point_to_point.timeout_s if timeout_s is None else timeout_s, quiet=timeout_s is not None
        )
        with tracing.blocked(self.name):
            through = backoff.wait_for(self.is_through, about=self._wait_reason)
        if not through:
            seen = f" ({backoff.missing})" if backoff.missing else ""
            communicator = self._point_to_point.communicator
            rank = communicator.global_ranks[communicator.rank]
            raise CollectiveTimeout(
                f"{self.name}: rank {rank} has waited {backoff.waited_s:.1f} s; the "
                "other side has not called its part (same tag?). Raise MPISGD_TIMEOUT_S or the group's own "
                f"timeout if ranks may be that far apart{seen}"
            )
        if self._error is not None:
            raise self._error
        if self._begun is not None:
            self._begun.wait(timeout_s)
        return True

    def _settle(self, future: Any) -> None:
        if self._begun is not None and self._error is None:
            self.stream = self._transfer.stream if self._transfer is not None else None
            try:
                with runtime().on(self.stream):
                    self._begun.wait()
            except MpisgdError as exc:
                self._error = exc
        super()._settle(future)

    def _wait_reason(self) -> WaitReason:
        partners = self.message.partners if len(self.message.partners) == 1 else ()
        return WaitReason(self.name, self.message.group, partners, message=self.message)

    def is_answered(self, everyones: Sequence[InFlight]) -> bool:
        """Return whether a partner has the other half of this message in flight; `everyones`: see `drain`.

        A receive is answered, too, where a partner has sent more than has come: that is on its way.
        """
        received = self._point_to_point.num_received
        names = self._point_to_point.communicator.global_ranks
        me = names[self._point_to_point.communicator.rank]
        for partner in self.message.partners:
            told = everyones[names.index(partner)]
            if self.is_receive and told.num_sent.get(me, 0) > received[partner]:
                return True
            if any(
                m.receives != self.is_receive and m.tag == self.message.tag and me in m.partners
                for m in told.messages
            ):
                return True
        return False

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future of this message; from now on it makes progress by itself."""
        with self._lock:
            if self._future is None and not self._done:
                self._point_to_point.watch(self)
            return super().get_future()

    def make_progress(self) -> None:
        """Wait for this message, in a callback of another one: nobody else would complete it."""
        if self._point_to_point.is_watching_here:
            self.wait()

    def fail(self, error: MpisgdError) -> None:
        """End this message without its being through; MPI may still write to its memory, which is kept."""
        with self._lock:
            if not self._done:
                requests = [self._request, *([] if self._transfer is None else self._transfer.requests)]
                self._point_to_point.communicator.abandon(requests, (self._memory, self._transfer))
                self.complete(error)

    def cancel(self) -> None:
        """Cancel this message, unless it is there."""
        if not self.is_through() and self._transfer is not None:
            with contextlib.suppress(MpisgdError):
                self.wait()  # its sender sends it already
            return
        with self._lock, contextlib.suppress(MpisgdError):
            if not self.is_through():
                self._point_to_point.communicator.cancel(self._request, self._memory)
                self.complete(NotInitialized(f"{self.name}: cancelled at the end, no message had come"))
