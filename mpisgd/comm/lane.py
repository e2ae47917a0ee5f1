"""A lane: the one order in which a group's collectives run.

MPI demands that all ranks of a communicator call its collectives in the same order. A lane keeps that order
for calls that block and calls that do not: the latter wait in a queue for the lane's thread, and a blocking
call runs at once in its caller's thread only when nothing is queued or running. No lane waits for another;
one thread for two groups that ranks use in opposite order would deadlock.
"""

import collections
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


def call_site() -> Callable[[], str]:
    """Return what tells, when asked, the line of the program that called into mpisgd."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_PROGRAM):
        frame = frame.f_back
    if frame is None:
        return lambda: "unknown place"
    code, line = frame.f_code, frame.f_lineno
    return lambda: f"{code.co_filename}:{line} in {code.co_name}"


class _Job:
    """One operation on its way through the lane."""

    __slots__ = ("action", "detail", "operation", "site", "work")

    def __init__(
        self, operation: Operation, action: Callable[[], None], tensors: Any, detail: Callable[[], str] | None
    ) -> None:
        self.operation = operation
        self.action = action
        self.site = call_site()
        self.detail = detail
        self.work = LaneWork(operation.kind, tensors)


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
        self._changed = threading.Condition()
        self._busy: threading.Thread | None = None
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
        job = _Job(operation, action, tensors, detail)
        if async_op:
            self._need_thread(operation)
        if self._busy is threading.current_thread():
            # A callback of the operation that runs on this thread: waiting for our own turn would be for
            # ever, and all ranks come by here at the same point of the order.
            self._perform(job)
        elif async_op:
            self._enqueue(job)
        else:
            self._run_now(job)
        if async_op:
            return job.work
        job.work.wait()
        return None

    def _run_now(self, job: _Job) -> None:
        """Run on this thread if nothing is before us, else let the lane's thread do it in its order."""
        with self._changed:
            free = self._busy is None and not self._queue
            if free:
                self._busy = threading.current_thread()
        if not free:
            self._enqueue(job)
            return
        try:
            self._perform(job)
        finally:
            self._end_turn()

    def _need_thread(self, operation: Operation) -> None:
        if not self._threads_allowed:
            raise MpiFailed(
                f"{operation.kind}: async_op=True needs an MPI that runs at thread level MULTIPLE; this one "
                "does not (was MPI started elsewhere with less?)"
            )

    def _end_turn(self) -> None:
        with self._changed:
            self._busy = None
            self._changed.notify_all()

    def _perform(self, job: _Job) -> None:
        error: BaseException | None = None
        try:
            if self.broken is not None:
                raise self.broken
            self.handshake.agree(job.operation, job.site, job.detail)
            with torch.inference_mode():  # else tensors made in that mode could not be written to here
                job.action()
        except CollectiveMismatch as exc:  # the ranks found out together, and go on together
            error = exc
        except BaseException as exc:  # it belongs to whoever waits; the other ranks may be left in the middle
            error = exc
            self.broken = self.broken or self._as_broken(job, exc)
        job.work.complete(error)

    def _as_broken(self, job: _Job, exc: BaseException) -> MpisgdError:
        if isinstance(exc, MpisgdError):
            return exc
        return MpiFailed(f"group '{self.name}' cannot be used any more: {job.operation} failed with {exc!r}")

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
                self._busy = threading.current_thread()
            self._perform(job)
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
