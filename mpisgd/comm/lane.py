"""A lane: the one order in which a group's collectives run.

MPI demands that all ranks of a communicator call its collectives in the same order. A lane keeps that order
for calls that block and calls that do not: the latter wait in a queue for the lane's thread, and a blocking
call runs at once in its caller's thread only when nothing is queued or running. No lane waits for another;
one thread for two groups that ranks use in opposite order would deadlock.
"""

import collections
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpisgd.comm.handshake import Handshake, Operation, Spread
from mpisgd.comm.work import LaneWork
from mpisgd.errors import CollectiveMismatch, MpiFailed, MpisgdError

if TYPE_CHECKING:
    from types import FrameType

    from mpisgd.comm.mpi import Wire

__all__ = ["Lane", "call_site"]

# A call site is a line of the program: not ours, and not torch's, which calls us at the end of backward.
NOT_THE_PROGRAM = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)


_AS_IT_IS = contextlib.nullcontext()


def call_site() -> Callable[[], str]:
    """Return what tells, when asked, the line of the program that called into mpisgd."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_PROGRAM):
        frame = frame.f_back
    if frame is None:
        return lambda: "unknown place"
    code, line = frame.f_code, frame.f_lineno
    return lambda: f"{code.co_filename}:{line} in {code.co_name}"


def _mode_of(tensors: Any) -> contextlib.AbstractContextManager[Any]:
    """Return torch's inference mode for tensors that were made in it; outside they cannot be written to."""
    if tensors and any(tensor.is_inference() for tensor in tensors):
        return torch.inference_mode()
    return _AS_IT_IS


class _Job(NamedTuple):
    """One operation that waits for its turn."""

    operation: Operation
    action: Callable[[], None]
    site: Callable[[], str]
    detail: Callable[[], str] | None
    work: LaneWork


class Lane:
    """The queue, the lock and (once something is asynchronous) the thread of one group.

    Args:
        wire: the lane's own communicator.
        spread: how its ranks compare what they are about to do.
        name: of the group, for messages.
        timeout_s: how long an operation waits for the other ranks.
        threads_allowed: whether MPI runs at THREAD_MULTIPLE, without which nothing can be asynchronous.
    """

    def __init__(
        self, wire: "Wire", spread: Spread, *, name: str, timeout_s: float, threads_allowed: bool
    ) -> None:
        self.wire = wire
        self.name = name
        self.handshake = Handshake(wire, spread, name=name, timeout_s=timeout_s)
        self.broken: MpisgdError | None = None
        self._threads_allowed = threads_allowed
        self._queue: collections.deque[_Job] = collections.deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._busy: int | None = None  # the thread whose turn it is
        self._thread: threading.Thread | None = None
        self._closing = False

    def run(
        self,
        operation: Operation,
        action: Callable[[], None],
        *,
        tensors: Any = None,
        async_op: bool = False,
        detail: Callable[[], str] | None = None,
    ) -> LaneWork | None:
        """Run `action` after all ranks have agreed on `operation`, in this lane's order.

        Args:
            operation: what the ranks must agree on.
            action: does the communication; runs on this thread or on the lane's.
            tensors: what the Work's future holds; kept alive until done.
            async_op: return at once with the Work.
            detail: tells more about this rank's view when the ranks disagree.
        """
        site = call_site()
        # A callback of the operation that runs on this thread may call the next one: waiting for our own
        # turn would be for ever, and all ranks come by here at the same point of the order.
        inside = self._busy == threading.get_ident()
        if not async_op and (inside or self._take_turn()):
            try:
                self._perform(operation, action, site, detail, tensors)
            finally:
                if not inside:
                    self._end_turn()
            return None
        if async_op:
            self._need_thread(operation)
        job = _Job(operation, action, site, detail, LaneWork(operation.kind, tensors))
        if inside:
            self._complete(job)
        else:
            self._enqueue(job)
        if async_op:
            return job.work
        job.work.wait()
        return None

    def _take_turn(self) -> bool:
        """Claim the lane for this thread, unless something is before us."""
        with self._lock:
            if self._busy is not None or self._queue:
                return False
            self._busy = threading.get_ident()
            return True

    def _need_thread(self, operation: Operation) -> None:
        if not self._threads_allowed:
            raise MpiFailed(
                f"{operation.kind}: async_op=True needs an MPI that runs at thread level MULTIPLE; this one "
                "does not (was MPI started elsewhere with less?)"
            )

    def _end_turn(self) -> None:
        with self._lock:
            self._busy = None
            if self._thread is not None:
                self._changed.notify_all()

    def _perform(
        self,
        operation: Operation,
        action: Callable[[], None],
        site: Callable[[], str],
        detail: Callable[[], str] | None,
        tensors: Any,
    ) -> None:
        """Agree and act. Whatever goes wrong leaves the other ranks in the middle, and the lane broken."""
        if self.broken is not None:
            raise self.broken
        try:
            self.handshake.agree(operation, site, detail)
            with _mode_of(tensors):
                action()
        except CollectiveMismatch:  # the ranks found out together, and go on together
            raise
        except BaseException as exc:
            self.broken = self._as_broken(operation, exc)
            raise

    def _complete(self, job: _Job) -> None:
        """Perform a queued operation; an error belongs to whoever waits for it."""
        error: BaseException | None = None
        try:
            self._perform(job.operation, job.action, job.site, job.detail, job.work.tensors)
        except BaseException as exc:
            error = exc
        job.work.complete(error)

    def _as_broken(self, operation: Operation, exc: BaseException) -> MpisgdError:
        if isinstance(exc, MpisgdError):
            return exc
        return MpiFailed(f"group '{self.name}' cannot be used any more: {operation} failed with {exc!r}")

    def _enqueue(self, job: _Job) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name=f"mpisgd lane '{self.name}'", daemon=True
                )
                self._thread.start()
            self._queue.append(job)
            self._changed.notify_all()

    def _serve(self) -> None:
        """The thread: run what is queued, sleep when nothing is."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._busy is None and (self._queue or self._closing))
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._busy = threading.get_ident()
            self._complete(job)
            self._end_turn()
            del job  # an idle thread must not keep the last operation's tensors alive

    def drain(self) -> None:
        """Let the queue run empty and end the thread. The lane can be used again.

        Every operation in the queue has its own time limit, so this ends.
        """
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread, self._closing = None, False
