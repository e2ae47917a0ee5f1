"""A queue: the one order in which a group's collectives run.

MPI demands that all ranks of a communicator call its collectives in the same order. A queue keeps that order
for calls that block and calls that do not: the latter wait in a queue for the queue's thread, and a blocking
call runs at once in its caller's thread only when nothing is queued or running. No queue waits for another;
one thread for two groups that ranks use in opposite order would deadlock.
"""

import collections
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpisgd import tracing
from mpisgd.arguments import check_flag
from mpisgd.core import wait_registry
from mpisgd.core.consistency import ConsistencyCheck, ConsistencyChecker, DigestExchange, Operation
from mpisgd.core.waiting import Backoff
from mpisgd.core.work import QueuedWork, Work
from mpisgd.errors import CollectiveMismatch, Deadlock, MpiFailed, MpisgdError

if TYPE_CHECKING:
    from types import FrameType

    from mpisgd.transport.mpi import Communicator

__all__ = ["OperationQueue", "Underway", "call_site", "mode_of"]

# A call site is a line of the program: not ours, and not torch's, which calls us at the end of backward.
NOT_THE_PROGRAM = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)

# An eager queue waits so long for the others before it leaves an asynchronous operation to its thread. Waking
# the thread takes about as long, and the cores have nothing to spare for it.
EAGER_S = 0.0003

_AS_IT_IS = contextlib.nullcontext()


def call_site() -> Callable[[], str]:
    """Return what tells, when asked, the line of the program that called into mpisgd."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_not_the_program(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return lambda: "unknown place"
    code, line = frame.f_code, frame.f_lineno
    return lambda: f"{code.co_filename}:{line} in {code.co_name}"


@functools.cache
def _is_not_the_program(filename: str) -> bool:
    return filename.startswith(NOT_THE_PROGRAM)


def mode_of(tensors: Any) -> contextlib.AbstractContextManager[Any]:
    """Return torch's inference mode for tensors that were made in it; outside they cannot be written to."""
    for tensor in tensors or ():
        if tensor.is_inference():
            return torch.inference_mode()
    return _AS_IT_IS


class _Job(NamedTuple):
    """One operation and how to do it; see `OperationQueue.run`.

    `exchange` is the agreement on it, where that has begun; `meets`: whether there is one; `watch`: who
    records it.
    """

    operation: Operation
    action: Callable[[], None]
    site: Callable[[], str]
    detail: Callable[[], str] | None
    before: Callable[[], None] | None
    after: Work | None
    tensors: Any
    timeout_s: float | None
    exchange: ConsistencyCheck | None = None
    meets: bool = True
    watch: tracing.Observed | None = None


class Underway(NamedTuple):
    """What a queue is in the middle of: the operation, who called it where, on which thread."""

    operation: Operation
    site: Callable[[], str]
    thread: int


class OperationQueue:
    """The queue, the lock and (once something is asynchronous) the thread of one group.

    Args:
        wire: the queue's own communicator.
        spread: how its ranks compare what they are about to do.
        name: of the group, for messages.
        timeout_s: how long an operation waits for the other ranks.
        threads_allowed: whether MPI runs at THREAD_MULTIPLE, without which nothing can be asynchronous.

    Attributes:
        broken: why the queue cannot be used any more.
        underway: the operation that runs now, None in between.
        track: what a recorder calls it.
        after_mismatch: called on every rank when they have found out that they disagree.
        when_left: called when this rank leaves an operation to which others may still come.
        eager: whether an asynchronous operation runs in its caller's thread when all ranks come to it at
            about the same time. That is right where no core is idle, so that nothing can be won by a thread.
            It waits for nothing but the other ranks' call of the same operation, and not for long, so a
            program that is right without it is right with it.
    """

    def __init__(
        self,
        wire: "Communicator",
        spread: DigestExchange,
        *,
        name: str,
        timeout_s: float,
        threads_allowed: bool,
    ) -> None:
        self.wire = wire
        self.name = name
        self.track = tracing.Track(f"group {name}")
        self.consistency = ConsistencyChecker(wire, spread, name=name, timeout_s=timeout_s)
        self.broken: MpisgdError | None = None
        self.underway: Underway | None = None
        self.threads_allowed = threads_allowed
        self.after_mismatch: Callable[[], None] = lambda: None
        self.when_left: Callable[[], None] = lambda: None
        self.eager = False
        self._queue: collections.deque[tuple[_Job, QueuedWork]] = collections.deque()
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
        before: Callable[[], None] | None = None,
        after: Work | None = None,
        timeout_s: float | None = None,
        way: str = "-",
        like: Any = None,
    ) -> QueuedWork | None:
        """Run `action` after all ranks have agreed on `operation`, in this queue's order.

        Args:
            operation: what the ranks must agree on.
            action: does the communication; runs on this thread or on the queue's.
            tensors: what the Work's future holds; kept alive until done.
            async_op: return at once with the Work.
            detail: tells more about this rank's view when the ranks disagree.
            before: called when the operation's turn has come, before the others hear of it.
            after: an earlier operation without which this one makes no sense: it is dropped if that failed.
                All ranks drop it: what fails without breaking the queue fails on all of them.
            timeout_s: how long to wait for the other ranks, instead of the queue's limit.
            way: what moves it, for who records it, unless the operation names an algorithm.
            like: a tensor of the size that is moved, where there are no `tensors`.
        """
        if async_op is not True and async_op is not False:
            async_op = check_flag(operation.kind, "async_op", async_op)
        job = _Job(operation, action, call_site(), detail, before, after, tensors, timeout_s)
        if tracing.sink is not None:
            watch = tracing.Observed(tracing.sink, self.track, operation, tensors or like, way, async_op)
            job = job._replace(watch=watch)
        # A callback of the operation that runs on this thread may call the next one: waiting for our own
        # turn would be for ever, and all ranks come by here at the same point of the order.
        thread = threading.get_ident()
        wait_registry.mark_communicating()
        inside = self._busy == thread
        if not async_op and (inside or self._take_turn()):
            try:
                self._perform(job)
            finally:
                if not inside:
                    self._end_turn()
            return None
        if async_op:
            self._need_thread(operation)
        work = QueuedWork(operation.kind, tensors)
        if inside:
            self._complete(job, work)
        elif async_op and self.eager and self._take_turn():
            self._start_here(job, work)
        else:
            self._enqueue(job, work)
        if async_op:
            return work
        work.wait()
        return None

    def note(self, operation: Operation) -> None:
        """Give an operation that others carry out, such as NCCL, its place in the order. Meets nobody."""
        if self.broken is not None:
            raise self.broken
        if tracing.sink is not None:
            tracing.sink.instant(self.track, f"{operation} launched", time.monotonic_ns())
        inside = self._busy == threading.get_ident()
        if not inside and not self._take_turn():
            job = _Job(operation, lambda: None, call_site(), None, None, None, None, None, meets=False)
            self._enqueue(job, QueuedWork(operation.kind, None))
            return
        self.consistency.note(operation)
        if not inside:
            self._end_turn()

    def _take_turn(self) -> bool:
        """Claim the queue for this thread, unless something is before us."""
        with self._lock:
            if self._busy is not None or self._queue:
                return False
            self._busy = threading.get_ident()
            return True

    def _need_thread(self, operation: Operation) -> None:
        if not self.threads_allowed:
            raise MpiFailed(
                f"{operation.kind}: async_op=True needs an MPI that runs at thread level MULTIPLE; this one "
                "does not (was MPI started elsewhere with less?)"
            )

    def _end_turn(self) -> None:
        with self._lock:
            self._busy = None
            if self._thread is not None:
                self._changed.notify_all()

    def _perform(self, job: _Job) -> None:
        """Agree and act. Whatever goes wrong leaves the other ranks in the middle, and the queue broken."""
        self._refuse_in_vain(job)
        if not job.meets:
            self.consistency.note(job.operation)
            return
        self.underway = Underway(job.operation, job.site, threading.get_ident())
        try:
            exchange = self._begin(job) if job.exchange is None else job.exchange
            if not exchange.advance():
                exchange.wait(Backoff(job.timeout_s or self.consistency.timeout_s))
            if job.watch is not None:
                job.watch.met()
            exchange.verify()
            self._act(job)
        except BaseException as exc:
            self._note_failure(job, exc)
            raise
        finally:
            self.underway = None
        if job.watch is not None:
            job.watch.ends()

    def _act(self, job: _Job) -> None:
        """Do the communication. What the ranks find out only now, such as sizes, is said with its place."""
        try:
            with mode_of(job.tensors):
                job.action()
        except Deadlock:
            raise
        except CollectiveMismatch as exc:
            place = f"group '{self.name}', operation {self.consistency.number}, at {job.site()}"
            raise CollectiveMismatch(f"{exc} ({place})") from None

    def _start_here(self, job: _Job, work: QueuedWork) -> None:
        """Perform an asynchronous operation now if the others come to it, else leave it to the thread."""
        try:
            exchange = self._try_to_meet(job)
        except BaseException as exc:
            work.complete(exc)
        else:
            job = job._replace(exchange=exchange)
            if exchange.advance():
                self._complete(job, work)
            else:
                self._enqueue(job, work, first=True)
        finally:
            self._end_turn()

    def _try_to_meet(self, job: _Job) -> ConsistencyCheck:
        """Begin the agreement and give the others a moment to join it."""
        self._refuse_in_vain(job)
        try:
            exchange = self._begin(job)
            exchange.advance() or Backoff(EAGER_S).wait_for(exchange.advance)
        except BaseException as exc:
            self._note_failure(job, exc)
            raise
        return exchange

    def _begin(self, job: _Job) -> ConsistencyCheck:
        if job.watch is None:
            return self.consistency.begin(job.operation, job.site, job.detail, job.before)
        return self._begin_watched(job, job.watch)

    def _begin_watched(self, job: _Job, watch: tracing.Observed) -> ConsistencyCheck:
        def before() -> None:
            if job.before is not None:
                job.before()
            watch.arrives(self.consistency.number)

        watch.begins()
        return self.consistency.begin(job.operation, job.site, job.detail, before)

    def _refuse_in_vain(self, job: _Job) -> None:
        """Raise where an earlier failure leaves no sense in this operation."""
        if self.broken is not None:
            raise self.broken
        if job.after is not None and (error := job.after.error) is not None:
            raise error

    def _note_failure(self, job: _Job, exc: BaseException) -> None:
        if job.watch is not None:
            job.watch.ends(exc)
        if isinstance(exc, CollectiveMismatch) and not isinstance(
            exc, Deadlock
        ):  # that the ranks found out together, and go on together
            self.after_mismatch()
        else:
            self.broken = self._as_broken(job.operation, exc)
            self.when_left()

    def _complete(self, job: _Job, work: QueuedWork) -> None:
        """Perform a queued operation; an error belongs to whoever waits for it."""
        error: BaseException | None = None
        try:
            self._perform(job)
        except BaseException as exc:
            error = exc
        work.complete(error)

    def _as_broken(self, operation: Operation, exc: BaseException) -> MpisgdError:
        if isinstance(exc, MpisgdError):
            return exc
        return MpiFailed(f"group '{self.name}' cannot be used any more: {operation} failed with {exc!r}")

    def _enqueue(self, job: _Job, work: QueuedWork, *, first: bool = False) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name=f"mpisgd queue '{self.name}'", daemon=True
                )
                self._thread.start()
            if first:
                self._queue.appendleft((job, work))
            else:
                self._queue.append((job, work))
            self._changed.notify_all()

    def _serve(self) -> None:
        """The thread: run what is queued, sleep when nothing is."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._busy is None and (self._queue or self._closing))
                if not self._queue:
                    return
                job, work = self._queue.popleft()
                self._busy = threading.get_ident()
            self._complete(job, work)
            self._end_turn()
            del job, work  # an idle thread must not keep the last operation's tensors alive

    def drain(self) -> None:
        """Let the queue run empty and end the thread. The queue can be used again.

        Every operation in the queue has its own time limit, so this ends.
        """
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread, self._closing = None, False
