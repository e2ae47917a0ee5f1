"""A group's point-to-point messages, outside the lane's order and on a communicator of their own.

MPI moves large messages only while somebody asks it to, so a started message makes progress in `wait()`,
in `is_completed()`, or in the background once its future was asked for.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpisgd.comm.waiting import Patience
from mpisgd.comm.work import Work
from mpisgd.errors import CollectiveTimeout, MpiFailed, MpisgdError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpisgd.comm.mpi import Wire

__all__ = ["Mailbox", "MessageWork"]

CROWDED = 64  # look for finished messages that nobody waited for once this many are under way


class Mailbox:
    """The messages under way between this rank and the others of a group.

    Args:
        wire: a communicator of its own.
        timeout_s: how long `wait()` waits by default.
        threads_allowed: whether futures, which need a thread, can be had.
    """

    def __init__(self, wire: "Wire", *, timeout_s: float, threads_allowed: bool) -> None:
        self.wire = wire
        self.timeout_s = timeout_s
        self._threads_allowed = threads_allowed
        self._under_way: set[MessageWork] = set()
        self._watched: set[MessageWork] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def send(self, name: str, memory: Tensor, dst: int, tag: int, tensors: Any) -> "MessageWork":
        """Start sending contiguous `memory` to group rank `dst`."""
        request = self.wire.isend(memory, dst, tag)
        return self._keep(MessageWork(self, f"{name} to group rank {dst}", request, (memory, tensors), None))

    def receive(
        self,
        name: str,
        memory: Tensor,
        src: int | None,
        tag: int,
        tensors: Any,
        arrived: Callable[[int], None],
    ) -> "MessageWork":
        """Start receiving into contiguous `memory`; `arrived(nbytes)` runs when the message is there."""
        request = self.wire.irecv(memory, src, tag)
        whom = "any rank" if src is None else f"group rank {src}"
        return self._keep(MessageWork(self, f"{name} from {whom}", request, (memory, tensors), arrived))

    def _keep(self, work: "MessageWork") -> "MessageWork":
        """Hold the message (and its memory) until it is done, also if the caller forgets it."""
        with self._lock:
            self._under_way.add(work)
            crowd = list(self._under_way) if len(self._under_way) > CROWDED else []
        for other in crowd:
            other.is_completed()
        return work

    def release(self, work: "MessageWork") -> None:
        """Forget a message that is done."""
        with self._lock:
            self._under_way.discard(work)

    def watch(self, work: "MessageWork") -> None:
        """See to it that `work` ends without anyone waiting for it."""
        if not self._threads_allowed:
            raise MpiFailed("the future of a message needs an MPI that runs at thread level MULTIPLE")
        with self._lock:
            idle = not self._watched
            self._watched.add(work)
        if idle:
            self._thread = threading.Thread(target=self._attend, name="mpisgd mailbox", daemon=True)
            self._thread.start()

    def _attend(self) -> None:
        """The thread: ask after the watched messages until none is left, however long that takes."""
        while self._watched:
            Patience(self.timeout_s).wait_for(self._some_ended)

    def _some_ended(self) -> bool:
        with self._lock:
            watched = list(self._watched)
        ended = {work for work in watched if work.is_completed()}
        with self._lock:
            self._watched -= ended
            return bool(ended) or not self._watched

    def drain(self) -> None:
        """Wait for everything that was sent and never waited for; give up unanswered receives."""
        for work in list(self._under_way):
            if work.is_receive:
                work.cancel()
            else:
                work.wait()
        if self._thread is not None and self._thread is not threading.current_thread():
            # A thread that lets go of a tensor while Python ends would abort the process.
            self._thread.join(self.timeout_s)


class MessageWork(Work):
    """One message under way.

    Attributes:
        source: group rank it came from, once it is done (None for a message sent).
    """

    def __init__(
        self,
        mailbox: Mailbox,
        name: str,
        request: "MPI.Request",
        memory: tuple[Tensor, Any],
        arrived: Callable[[int], None] | None,
    ) -> None:
        self.name = name
        self.source: int | None = None
        self.is_receive = arrived is not None
        self._mailbox = mailbox
        self._request = request
        self._memory = memory
        self._arrived = arrived
        self._done = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.RLock()

    def is_completed(self) -> bool:
        """Return whether the message is through; asking moves it along."""
        with self._lock:
            if not self._done:
                self._ask()
            return self._done

    def _ask(self) -> None:
        try:
            outcome = self._mailbox.wire.poll_one(self._request)
            if outcome is None:
                return
            if self._arrived is not None:
                self.source = outcome[0]
                self._arrived(outcome[1])
        except MpisgdError as exc:
            self._error = exc
        self._finish()

    def _finish(self) -> None:
        self._done = True
        self._mailbox.release(self)
        if self._future is not None:
            self._settle(self._future)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the message is through."""
        patience = Patience(self._mailbox.timeout_s if timeout_s is None else timeout_s)
        if not patience.wait_for(self.is_completed):
            wire = self._mailbox.wire
            raise CollectiveTimeout(
                f"{self.name}: rank {wire.rank} of {wire.size} has waited {patience.waited_s:.1f} s; the "
                "other side has not called its part (same tag?). Raise MPISGD_TIMEOUT_S if ranks may be "
                "that far apart"
            )
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future of this message; from now on it makes progress by itself."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._done:
                    self._settle(self._future)
                else:
                    self._mailbox.watch(self)
            return self._future

    def _settle(self, future: "torch.futures.Future[Any]") -> None:
        if self._error is None:
            future.set_result(self._memory[1])
        else:
            future.set_exception(self._error)

    def cancel(self) -> None:
        """Give up waiting for this message."""
        with self._lock, contextlib.suppress(MpisgdError):
            if not self._done:
                self._mailbox.wire.cancel(self._request)
                self._finish()
