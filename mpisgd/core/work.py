"""`Work`: an operation that was started and may not be done yet."""

import abc
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mpisgd import tracing
from mpisgd.accelerator.futures import completed_on
from mpisgd.errors import CollectiveTimeout, MpiFailed, MpisgdError, NotInitialized, afresh
from mpisgd.threads.callbacks import Callbacks
from mpisgd.threads.scheduling import now_s, scheduler, wait_for_event
from mpisgd.threads.wait_registry import WaitReason, waiting_for

__all__ = ["CompletableWork", "QueuedWork", "Work"]

CHECK_S = 1.0  # how often who waits for a queue's thread sees whether a callback keeps it


class Work(abc.ABC):
    """An operation in flight; what `async_op=True` returns.

    The operation's tensors belong to it until it is done: leave them alone until `wait()` has returned.
    """

    @abc.abstractmethod
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the operation is done, and return True.

        Args:
            timeout_s: how long to wait; None: until the operation ends, which has its own timeout.

        Raises:
            CollectiveTimeout: the operation was not done within `timeout_s` seconds. It continues, and
                `wait()` may be called again.
            MpisgdError: the operation failed; the same error as the blocking call raises.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Return whether `wait()` would return (or raise) at once."""

    @property
    @abc.abstractmethod
    def error(self) -> BaseException | None:
        """The error with which the operation has failed; None while it runs or if it has succeeded."""

    @abc.abstractmethod
    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that holds the operation's tensors once it is done, or its error."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the operation is over and before any `wait()` returns.

        It is called at once if the operation is over already, or if this process is not told of its end.
        A work has at most one callback.
        """
        callback()


class CompletableWork(Work):
    """A work that a thread of this process completes: all but how to wait for it.

    Args:
        name: of the operation, for messages.
        tensors: what the future holds; kept alive until then.

    Attributes:
        stream: on a device, the one whose work brings the result; None on the host.
    """

    def __init__(self, name: str, tensors: Any) -> None:
        self.name = name
        self.tensors = tensors
        self._done = False
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._future: _WorkFuture | None = None
        self._callback: Callable[[], None] | None = None
        self.stream: Any = None

    @property
    def error(self) -> BaseException | None:
        """The error with which the operation has failed; None while it runs or if it has succeeded."""
        return self._error

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return the future of this operation; callbacks run on the thread that completes it."""
        with self._lock:
            if self._future is None:
                self._future = _WorkFuture(self, [] if self.stream is None else [self.stream.device])
                if self._done:
                    self._settle(self._future)
            return self._future

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the thread that completes the operation, or now."""
        with self._lock:
            if not self._done:
                self._callback = callback
                return
        callback()

    def complete(self, error: BaseException | None) -> None:
        """Mark the operation as done. Called once, by the thread that ran it."""
        self._error = error
        future = None
        try:
            with self._lock:
                self._done = True
                future = self._future
                if self._callback is not None:
                    self._callback()
        finally:  # whatever a callback raises, nobody waits for ever
            self._end_waits()
            if future is not None:
                self._complete_future(future)

    def _end_waits(self) -> None:
        """Wake who waits, before callbacks of the future run: they may wait for this operation, too."""

    def _complete_future(self, future: "_WorkFuture") -> None:
        """Give the future its value, on the thread that has completed the operation: its callbacks run."""
        self._settle(future)

    def make_progress(self) -> None:
        """Bring this operation to its end, where it cannot come to it while this thread waits.

        That is so in a callback, which runs on the thread that would complete it.
        """

    def _settle(self, future: "_WorkFuture") -> None:
        future.work = None
        if self._error is None and self.stream is None:
            future.set_result(self.tensors)
        elif self._error is None:
            completed_on(future, self.stream, self.tensors)
        elif isinstance(self._error, MpisgdError):
            # Not the one whose frames hold this work, and so the future: nothing would ever free that.
            future.set_exception(afresh(self._error))
        elif isinstance(self._error, Exception):
            future.set_exception(self._error)
        else:  # what ends a thread is no result of a future
            future.set_exception(MpiFailed(f"{self.name}: its thread was ended by {self._error!r}"))


class _WorkFuture(torch.futures.Future[Any]):
    """The future of an operation: who waits for it in a callback brings the operation to its end.

    Attributes:
        work: the operation, None once it is over.
    """

    def __init__(self, work: CompletableWork, devices: Sequence[torch.device]) -> None:
        super().__init__(devices=list(devices))
        self.work: CompletableWork | None = work

    def wait(self) -> Any:
        """Block until the operation is over; return its tensors, or raise its error."""
        if (work := self.work) is not None:
            work.make_progress()
        if (own := scheduler()) is not None:
            own.wait(self.done, math.inf)
        return super().wait()


class _Queue(Protocol):
    """What a work needs of the queue that it is in; see `mpisgd.core.operation_queue.OperationQueue`."""

    callbacks: Callbacks

    def run_until(self, ended: Callable[[], bool]) -> None:
        """Run what is queued until that holds, if this thread has the queue's turn."""


class QueuedWork(CompletableWork):
    """A collective in its group's queue, completed by the thread that runs it.

    Args:
        name: see `CompletableWork`, as for `tensors`.
        queue: the queue.
    """

    def __init__(self, name: str, tensors: Any, queue: _Queue) -> None:
        super().__init__(name, tensors)
        self._queue = queue
        self._ended = threading.Event()
        self._reported = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the queue has run this operation, which has its own timeout on the other ranks."""
        done = self._ended.is_set()
        if not done:
            with (
                tracing.blocked(self.name),
                waiting_for(WaitReason(f"{self.name} (asynchronous)", is_local=True), timeout_s),
            ):
                done = self._wait_for_queue(timeout_s)
        if not done:
            raise CollectiveTimeout(f"{self.name}: not done after {timeout_s} s")
        self._reported = True
        if self._error is not None:
            raise self._error
        if self._future is not None:
            self._future.wait()  # it is completed right after the event is set
        return True

    def _wait_for_queue(self, timeout_s: float | None) -> bool:
        """Return True when this operation is over, False when the limit passed first."""
        self.make_progress()
        deadline_s = math.inf if timeout_s is None else now_s() + timeout_s
        while not wait_for_event(self._ended, max(0.0, min(CHECK_S, deadline_s - now_s()))):
            if now_s() >= deadline_s:
                return False
            self._queue.callbacks.check()
        return True

    def make_progress(self) -> None:
        """Run what is queued up to this operation, in a callback of one that was before it."""
        self._queue.run_until(self._ended.is_set)

    def is_completed(self) -> bool:
        """Return whether the queue has run this operation."""
        return self._ended.is_set()

    def _end_waits(self) -> None:
        self._ended.set()

    def __del__(self) -> None:
        """Warn of an error that was never raised by `wait()` or the future.

        Not of the end of its thread, nor where this rank has aborted or destroyed the group itself.
        """
        error = self._error
        if isinstance(error, Exception) and not isinstance(error, NotInitialized) and not self._reported:
            warnings.warn(f"{self.name} failed and nobody waited for it: {error}", RuntimeWarning, 2)

    def _complete_future(self, future: _WorkFuture) -> None:
        with self._queue.callbacks.run(self.name):
            super()._complete_future(future)

    def _settle(self, future: _WorkFuture) -> None:
        self._reported = True
        super()._settle(future)
