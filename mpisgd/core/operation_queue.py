"""`OperationQueue`: the one order in which a group's collectives run.

MPI demands that all ranks of a communicator call its collectives in the same order. A queue keeps that order
for blocking and for asynchronous calls: the latter wait in it for its thread, and a blocking call runs at
once in its caller's thread when nothing is queued or running. No queue waits for another: one thread for two
groups that ranks use in opposite order would deadlock.
"""

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from mpisgd import tracing
from mpisgd.arguments import check_flag
from mpisgd.core.consistency import ConsistencyChecker, Operation
from mpisgd.core.failure_scope import FailureScope
from mpisgd.core.owner import current_owner, owned_by
from mpisgd.core.submission import Note, RepeatedOperation, Submission
from mpisgd.core.work import QueuedWork, Work
from mpisgd.errors import (
    CollectiveMismatch,
    Deadlock,
    InvalidArgument,
    MpiFailed,
    MpisgdError,
    afresh,
)
from mpisgd.interfaces.communicator import DigestExchange, GroupCommunicator
from mpisgd.threads import wait_registry
from mpisgd.threads.callbacks import Callbacks
from mpisgd.threads.calling_thread import check_calling_thread
from mpisgd.threads.scheduling import wait_for_condition
from mpisgd.threads.service_thread import ServiceThread
from mpisgd.threads.waiting import Backoff

__all__ = ["OperationQueue"]

# With `runs_inline`, an asynchronous operation waits so long for the other ranks before it is left to the
# queue's thread. Waking the thread takes about as long, and the cores have nothing to spare for it.
INLINE_WAIT_S = 0.0003
ABORT_S = 2.0  # a wait that has begun just now can be ended this soon, and much sooner in general
ABORT_INTERVAL_S = 0.005
JOIN_S = 1.0  # between two looks at what keeps the thread
_NO_SCOPE = contextlib.nullcontext()


class OperationQueue:
    """The queue, the lock and (once something is asynchronous) the thread of one group.

    Args:
        communicator: the queue's own communicator.
        digest_exchange: how its ranks compare what they are about to do.
        name: of the group, for messages.
        timeout_s: how long an operation waits for the other ranks.
        threads_allowed: whether MPI runs at THREAD_MULTIPLE, without which nothing can be asynchronous.
        ranks: the group's global ranks, for the timeline.
        on_failure: called when an operation fails on this rank that others may still come to.
        scope: whose loss ends its operations; None: that of any rank of the job.

    Attributes:
        communicator: the communicator.
        scope: as given.
        broken: why the queue cannot be used any more.
        running: the operation that runs now, None in between.
        on_mismatch: called on every rank when they have found out that they disagree, unless all that came
            before is the same on all: what the GPU has not done of that yet, it will do.
        callbacks: those that run on futures of its operations.
        uneven: what some ranks may run out of data in, a `mpisgd.core.uneven_data.UnevenData`, where there is
            one.
        runs_inline: whether an asynchronous operation runs in its caller's thread when all ranks come to it
            at about the same time. That is right where no core is idle, so that a thread wins nothing. It
            waits for nothing but the other ranks' call of the same operation, and not for long, so a program
            that is right without it is right with it.
    """

    def __init__(
        self,
        communicator: GroupCommunicator,
        digest_exchange: DigestExchange,
        *,
        name: str,
        timeout_s: float,
        threads_allowed: bool,
        ranks: tuple[int, ...] = (),
        on_failure: Callable[[], None] = lambda: None,
        scope: FailureScope | None = None,
    ) -> None:
        self.communicator = communicator
        self.scope = scope
        self.name = name
        self.track = tracing.Track(f"group {name}", ranks)
        self.consistency = consistency = ConsistencyChecker(
            communicator, digest_exchange, name=name, timeout_s=timeout_s
        )
        self.broken: MpisgdError | None = None
        self.running: Submission | None = None
        self.threads_allowed = threads_allowed
        self.on_mismatch: Callable[[], None] = lambda: None
        self.runs_inline = False
        self.uneven: Any = None
        self._on_failure = on_failure
        self._queue: collections.deque[tuple[Submission, QueuedWork]] = collections.deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._busy: int | None = None  # the thread whose turn it is
        self._thread: ServiceThread | None = None
        # Not by `self`: in a cycle, the memory and files of a group would live on until garbage is collected.
        self.callbacks = Callbacks(name, lambda: consistency.timeout_s)
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
        transport: str = "-",
        like: Any = None,
    ) -> QueuedWork | None:
        """Run `action` after all ranks have agreed on `operation`, in this queue's order.

        Args:
            operation: what the ranks must agree on.
            action: does the communication; runs on this thread or on the queue's.
            tensors: what the Work's future holds; kept alive until done.
            async_op: return at once with the Work.
            detail: tells more about this rank's call when the ranks disagree.
            before: called when the operation's turn has come, before the others are told of it.
            after: an earlier operation without which this one makes no sense: it is dropped if that failed.
                All ranks drop it: what fails without breaking the queue fails on all of them.
            timeout_s: how long to wait for the other ranks, instead of the queue's limit.
            transport: what moves it, for the timeline, unless the operation names an algorithm.
            like: a tensor of the size that is moved, where there are no `tensors`.
        """
        if async_op is not True and async_op is not False:
            async_op = check_flag(operation.kind, "async_op", async_op)
        if self.uneven is not None:
            self.uneven.intercept(operation.kind)
        if (owner := current_owner()) is not None:
            operation = operation._replace(owner=owner)
        submission = Submission(operation, action, detail, before, after, tensors, timeout_s)
        if tracing.sink is not None:
            submission.span = tracing.OperationSpan(
                tracing.sink, self.track, operation, tensors or like, transport, async_op
            )
        # A callback of the operation that runs on this thread may call the next one: waiting for our own
        # turn would be for ever, and all ranks come by here at the same point of the order.
        thread = threading.get_ident()
        if (only_thread := self.communicator.only_thread) is not None:
            check_calling_thread(only_thread, operation.kind)
        wait_registry.mark_communicating()
        inside = self._busy == thread
        if not async_op and (inside or self._take_turn(thread)):
            try:
                self._perform(submission)
            finally:
                if not inside:
                    self._end_turn()
            return None
        if async_op and not self.threads_allowed:
            raise MpiFailed(
                f"{operation.kind}: async_op=True needs an MPI that runs at thread level MULTIPLE; this one "
                "does not (was MPI started elsewhere with less?)"
            )
        work = QueuedWork(operation.kind, tensors, self)
        if inside:
            self._complete(submission, work)
        elif async_op and self.runs_inline and self._take_turn(thread):
            self._run_inline(submission, work)
        else:
            self._enqueue(submission, work)
        if async_op:
            return work
        work.wait()
        return None

    def run_again(self, again: RepeatedOperation, tensor: Any) -> bool:
        """Run an operation of a known form in this thread, if it is its turn and nothing else is to be done.

        Small messages feel every call, so this is what `run` does with all that is not needed left out.

        Args:
            again: of this queue.
            tensor: of this call, an ordinary one of the CPU.

        Returns:
            False where nothing was done and `run` is needed: something runs or is queued, is recorded, has
            an owner or has failed, or ranks may be without data; or the queue has a scope.
        """
        thread = threading.get_ident()
        if (
            tracing.sink is not None
            or self.uneven is not None
            or self.scope is not None
            or self.communicator.only_thread not in (None, thread)
            or current_owner() is not None
            or not self._take_turn(thread)
        ):
            return False
        if self.broken is not None:  # not before: an abort waits for who has the turn alone
            self._end_turn()
            return False
        try:
            wait_registry.mark_communicating()
            again.thread = thread
            self.running = again
            if again.first_part is not None:
                again.first_part(tensor)
            checker = self.consistency
            if not checker.agree_soon(again, again.digest):
                again.wait(Backoff(checker.timeout_s))
                again.verify()
            if again.rest is not None:
                again.rest(tensor)
        except BaseException as exc:
            self._note_failure(again, exc)
            raise
        finally:
            self.running = None
            self._end_turn()
        return True

    def note(self, operation: Operation) -> None:
        """Give an operation that others carry out, such as NCCL, its place in the order. Sends nothing."""
        if self.uneven is not None:
            self.uneven.intercept(operation.kind)
        if self.broken is not None:
            raise afresh(self.broken)
        if (owner := current_owner()) is not None:
            operation = operation._replace(owner=owner)
        if tracing.sink is not None:
            tracing.sink.instant(self.track, f"{operation} launched", time.monotonic_ns())
        thread = threading.get_ident()
        inside = self._busy == thread
        if not inside and not self._take_turn(thread):
            self._enqueue(Note(operation), QueuedWork(operation.kind, None, self))
            return
        self.consistency.note(operation)
        if not inside:
            self._end_turn()

    def _take_turn(self, thread: int) -> bool:
        """Claim the queue for this thread, unless something is before us."""
        with self._lock:
            if self._busy is not None or self._queue:
                return False
            self._busy = thread
            return True

    def _end_turn(self) -> None:
        with self._lock:
            self._busy = None
            if self._thread is not None and (self._queue or self._closing):  # else it has nothing to do
                self._changed.notify_all()

    def _perform(self, submission: Submission) -> None:
        """Check and act. Whatever goes wrong leaves the other ranks in the middle, and the queue broken."""
        submission.check_usable(self.broken)
        self.running = submission
        try:
            with self._in_scope():
                submission.perform(self.consistency)
        except BaseException as exc:
            self._note_failure(submission, exc)
            raise
        finally:
            self.running = None

    def _run_inline(self, submission: Submission, work: QueuedWork) -> None:
        """Perform an asynchronous operation now if the others come to it, else leave it to the thread."""
        try:
            self._begin_and_wait_shortly(submission)
        except BaseException as exc:
            work.complete(exc)
        else:
            if submission.advance():
                self._complete(submission, work)
            else:
                self._enqueue(submission, work, first=True)
        finally:
            self._end_turn()

    def _begin_and_wait_shortly(self, submission: Submission) -> None:
        """Begin the consistency check and give the others a moment to come to it."""
        submission.check_usable(self.broken)
        try:
            with self._in_scope():
                submission.begin(self.consistency)
                submission.advance() or Backoff(INLINE_WAIT_S).wait_for(submission.advance)
        except BaseException as exc:
            self._note_failure(submission, exc)
            raise

    def _in_scope(self) -> contextlib.AbstractContextManager[None]:
        return _NO_SCOPE if self.scope is None else self.scope.operation()

    def _note_failure(self, submission: Submission, exc: BaseException) -> None:
        if submission.span is not None:
            submission.span.ends(exc)
        if isinstance(exc, CollectiveMismatch) and not isinstance(exc, Deadlock):  # the same on all ranks
            if not exc.agreed_before:
                self.on_mismatch()
        else:
            reason = (
                f"group '{self.name}' cannot be used any more: {submission.operation} failed with {exc!r}"
            )
            self.broken = exc if isinstance(exc, MpisgdError) else MpiFailed(reason)
            self._on_failure()

    def _complete(self, submission: Submission, work: QueuedWork) -> None:
        """Perform a queued operation; its error is raised by the work's `wait()`.

        Operations inside it, as between the ranks of a host, belong to the same owner on every rank, whether
        this is the thread that began it or another one.
        """
        error: BaseException | None = None
        try:
            with owned_by(submission.operation.owner):
                self._perform(submission)
        except BaseException as exc:
            error = exc
        work.complete(error)

    def _enqueue(self, submission: Submission, work: QueuedWork, *, first: bool = False) -> None:
        submission.remember_site()
        with self._changed:
            if self._thread is None:
                self._thread = ServiceThread(f"mpisgd queue '{self.name}'", self._serve_or_end)
                self._thread.start()
            if first:
                self._queue.appendleft((submission, work))
            else:
                self._queue.append((submission, work))
            self._changed.notify_all()

    def _serve_or_end(self) -> bool:
        """One round of the thread; where that ends it, nobody waits for ever for what is queued."""
        try:
            return self._serve()
        except Exception:
            raise
        except BaseException as exc:
            with self._lock:
                self._thread, queued = None, list(self._queue)
                self._queue.clear()
            for submission, work in queued:
                work.complete(MpiFailed(f"{submission.operation}: the queue's thread was ended by {exc!r}"))
            raise

    def _serve(self) -> bool:
        """One round of the thread: sleep until something is queued, run it."""
        with self._changed:
            wait_for_condition(
                self._changed, lambda: self._busy is None and bool(self._queue or self._closing)
            )
            if not self._queue:
                self._thread = None  # under the lock: what is submitted from now on starts another thread
                return False
            submission, work = self._queue.popleft()
            self._busy = threading.get_ident()
        try:
            self._complete(submission, work)
        finally:
            self._end_turn()
        return True

    def run_until(self, ended: Callable[[], bool]) -> None:
        """Run what is queued until that holds, if this thread has the queue's turn: in a callback.

        Raises:
            InvalidArgument: the thread is in the middle of an operation, which all ranks would wait for.
        """
        while self._busy == threading.get_ident() and not ended():
            if self.running is not None:
                raise InvalidArgument(
                    f"{self.running.operation} (group '{self.name}') waits for an operation that runs "
                    "after it"
                )
            with self._lock:
                if not self._queue:
                    return
                submission, work = self._queue.popleft()
            self._complete(submission, work)

    def abort(self, error: MpisgdError) -> bool:
        """Let what runs in this queue, and whatever comes, end with `error` on this rank; from any thread.

        Returns:
            Whether what runs has ended. It has not where it does not wait, but is in a call of MPI.
        """
        with self._lock:
            self.broken = self.broken or error
            thread = self._busy
        deadline_s = time.monotonic() + ABORT_S
        while thread is not None and thread != threading.get_ident() and thread == self._busy:
            if time.monotonic() > deadline_s:
                return False
            for wait in wait_registry.registered():
                if wait.thread == thread:
                    wait_registry.cancel(wait, error)
            time.sleep(ABORT_INTERVAL_S)
        return True

    def drain(self) -> None:
        """Run all that is queued and end the thread. The queue can be used again.

        Every operation in the queue has its own timeout, so this ends.
        """
        while True:
            with self._changed:
                thread = self._thread
                if thread is threading.current_thread():
                    return
                self._closing = thread is not None
                self._changed.notify_all()
            if thread is None:
                return
            thread.join_from_others(JOIN_S)
            self.callbacks.check()
