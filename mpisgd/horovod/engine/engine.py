"""`Engine`: runs operations once every member of their process set has submitted them.

    submit     into the queue, from any thread of this rank, in any order (`tensor_queue`)
                  |  a cycle is due when somebody waits, enough was submitted, or some time has passed;
                  |  the thread that waits runs it, else the progress thread
    exchange   every rank sends what it has submitted since the last cycle (`cycles`, `exchange`)
                  |
    decide     all ranks come to the same decisions, in the same order (`request_table`)
                  |
    execute    what can be fused runs as one, on the process set's group (`fusion`, `operations`)

The engine has a progress thread, so that nothing needs a rank's main thread. But a thread that waits for a
result runs the cycles meanwhile, and the progress thread does not: waking another would only cost time.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mpisgd import tracing
from mpisgd.arguments import ranks_text
from mpisgd.errors import CollectiveTimeout, MpisgdError
from mpisgd.horovod.engine.cycles import WITHDRAW, Cycles
from mpisgd.horovod.engine.entry import Entry, to_internal_error
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.settings import Settings
from mpisgd.horovod.engine.stall_inspector import registered_wait
from mpisgd.horovod.exceptions import HorovodInternalError
from mpisgd.job.world import Job
from mpisgd.monitor.rank_snapshot import stack_of
from mpisgd.threads import scheduling, wait_registry
from mpisgd.threads.service_thread import InheritingThread
from mpisgd.threads.wait_registry import WaitReason

__all__ = ["Engine"]

JOIN_INTERVAL_S = 0.2  # how often who waits for the end of the thread looks for a deadlock


class _Deferred(threading.local):
    """What this thread would submit before it waits, by owner."""

    def __init__(self) -> None:
        self.submits: dict[object, Callable[[], None]] = {}


class Engine(Cycles):
    """The negotiated operations of this rank, for any of its threads, and the threads that run the cycles.

    Making and closing one is collective over the job.

    Args:
        job: whose ranks negotiate.
        settings: see there.
        warn: called with a text when operations stall; on the first rank.

    Attributes:
        lock: held by the thread that runs a cycle.
    """

    def __init__(self, job: Job, settings: Settings, warn: Callable[[str], None]) -> None:
        super().__init__(job, settings, warn)
        self.lock = threading.Lock()
        self._deferred = _Deferred()
        self._limit_s = job.timeout_s
        self._thread = InheritingThread(target=self._serve, name="mpisgd horovod", daemon=True)
        self._thread.start()

    # -- operations ------------------------------------------------------------------------------------

    def defer(self, owner: object, submit: Callable[[], None]) -> None:
        """Have `submit` called before this thread waits for any operation, unless `owner` recalls it.

        What could be submitted by now, and would only be slower for it: other ranks may need it before they
        come to what this thread is going to wait for.
        """
        self._deferred.submits[owner] = submit

    def recall(self, owner: object) -> None:
        """Forget what was deferred for an owner: it has submitted by itself."""
        self._deferred.submits.pop(owner, None)

    def submit_deferred(self) -> None:
        """Submit what this thread has deferred."""
        submits = self._deferred.submits
        while submits:
            submits.pop(next(iter(submits)))()

    def wait(self, entry: Entry) -> Any:
        """Return the result of an operation, once it has run. What was submitted before is sent at once.

        What interrupts this thread, such as Ctrl-C, is raised as it is. Between two cycles it changes nothing
        else; in the middle of one, where the other ranks are left without this one, it ends the engine.
        """
        if not entry.done.is_set():
            self.submit_deferred()
            self._run_until(entry)
        return entry.take_result()

    def perform(self, entry: Entry) -> Any:
        """Submit an operation, after what was deferred, and return its result."""
        self.submit_deferred()
        return self.wait(self.submit(entry))

    def spans_hosts(self, set_id: int) -> bool:
        """Return whether the members of a process set that this rank is in are on several hosts."""
        group = self.process_sets.groups.get(set_id)
        return group is not None and group.spans_hosts

    def awaited(self, set_id: int, prefix: str) -> list[Request]:
        """Return requests under names with this prefix that other members alone have submitted."""
        with self.lock:
            return self._request_table.waiting_for(self.group.rank, set_id, prefix)

    # -- the threads -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        wait_registry.workers[threading.get_ident()] = self._can_progress
        try:
            while not self.is_finished():
                self._serve_or_sleep()
        except BaseException as exc:
            if not self.is_finished():
                self.abort(exc)
        finally:
            del wait_registry.workers[threading.get_ident()]

    def _serve_or_sleep(self) -> None:
        state = self.wake_up.state()
        steps_back = self.queue.num_waiting > 0
        if not steps_back and self._take(None):
            return
        sleep_s = self.queue.begin_sleep(self.check_interval_s())
        if steps_back and not self.queue.num_waiting:
            return
        self.wake_up.sleep(state, sleep_s)
        self.queue.end_sleep()

    def _run_until(self, entry: Entry) -> None:
        """Run cycles until an operation is done."""
        began_s = time.monotonic()
        self.queue.count_waiting(1)
        try:
            with tracing.blocked(entry.request.label):
                while not entry.done.is_set():
                    state = self.wake_up.state()
                    if not self._take(entry) and not entry.done.is_set():
                        self._sleep(entry, state, began_s)
        finally:
            if not self.queue.count_waiting(-1):
                with self._between_cycles() as is_between:
                    hands_back = not is_between or self.is_cycle_due()
                if hands_back:  # to the engine's thread, which has left it to those who waited
                    self.wake_up.wake_own()

    def _sleep(self, entry: Entry, state: int, began_s: float) -> None:
        """Sleep until there may be something to do, or until it is found out that there never will be."""
        with registered_wait(lambda: self._wait_reason(entry.request), began_s, self.wake_up.wake_own):
            error = wait_registry.cancel_error(began_s)
            if error is None:
                self.wake_up.sleep(state, self.check_interval_s())
        if (error := error or wait_registry.cancel_error(began_s)) is not None:
            self._withdraw(entry, error)

    def _take(self, awaited: Entry | None) -> bool:
        """Run a cycle if there is reason to, and return whether there was."""
        with self.lock:
            if awaited is not None and awaited.done.is_set():  # somebody else's cycle has seen to it
                return True
            try:
                if wanted := self.is_cycle_due():
                    self.run_one()
                self.run_checks()
            except BaseException as exc:
                self.abort(exc)
                if awaited is None or not isinstance(exc, Exception):
                    raise
                return True  # its error tells who waits for it
        if wanted and self.queue.num_waiting > (awaited is not None):
            self.wake_up.wake_own()  # others who wait may find theirs done
        return wanted

    @contextlib.contextmanager
    def _between_cycles(self) -> Iterator[bool]:
        """Let no cycle begin meanwhile; False where one runs."""
        is_between = self.lock.acquire(blocking=False)
        try:
            yield is_between
        finally:
            if is_between:
                self.lock.release()

    # -- deadlocks -------------------------------------------------------------------------------------

    def _can_progress(self) -> bool:
        """Return whether a cycle runs, or will without anyone's submitting anything; from any thread.

        An idle engine cannot do anything by itself: what it waits for, other ranks' programs must do.
        """
        with self._between_cycles() as is_between:
            return (
                not is_between
                or self.num_cycles < self.wake_up.known_cycle()
                or self.queue.has_unsent()
                or self._stalls.wants_stacks
                or bool(self._request_table.name_conflicts())
            )

    def _wait_reason(self, request: Request | None) -> WaitReason:
        """Tell for whom an operation waits, or, of None, the shutdown; not known while a cycle runs."""
        whom: frozenset[int] = frozenset()
        with self._between_cycles() as is_between:
            if is_between and request is None:
                whom = frozenset(self.group.ranks) - self._departed
            elif is_between and request is not None:
                whom = self._request_table.missing(request.key)
        call = "shutdown" if request is None else str(request)
        return WaitReason(f"hvd.{call}", awaited=tuple(sorted(whom - {self.group.rank})))

    def _withdraw(self, entry: Entry, error: Exception) -> None:
        """Fail an operation that is part of a deadlock; the other ranks' part in it stays pending.

        The request goes through a cycle, so that all ranks learn of it at the same place of their order, and
        whatever they submit from then on works.
        """
        request = entry.request
        if entry.deadlock is None:
            entry.deadlock = HorovodInternalError(str(error))
            name = f"{WITHDRAW}.{request.set_id}.{request.name}"
            self.submit(Entry(Request(name, WITHDRAW, request.set_id, op=request.name)), by_engine=True)

    # -- the end ---------------------------------------------------------------------------------------

    def close(self, lost: MpisgdError | None = None) -> None:
        """Submit nothing any more, and return when no rank does. Collective.

        Args:
            lost: the loss of a rank. The engine ends without the others then, and what is under way fails.

        Raises:
            HorovodInternalError: not all ranks have come to their end within the job's time limit, or some
                wait for ever, for this one too. The engine is aborted then, and so should the job be.
        """
        if lost is not None and self.queue.broken is None:
            self.abort(lost)
        self.queue.leave()
        self.wake_up.wake_own()
        try:
            self._wait_for_the_thread()
        except MpisgdError as exc:
            self.abort(exc)
            raise to_internal_error(exc) from None
        finally:
            if self._watchdog is not None:
                self._watchdog.warning_s, self._watchdog.abort_s = self._job_limits_s
        self.wake_up.close()
        if self.queue.broken is None:
            self.process_sets.close()
            self._local.free()
            self._communicator.free()

    def _wait_for_the_thread(self) -> None:
        """Return when the last cycle has run.

        Raises:
            CollectiveTimeout: it has not within the job's time limit.
            Deadlock: it never will.
        """
        began_s = time.monotonic()
        with registered_wait(lambda: self._wait_reason(None), began_s):
            while scheduling.runs(self._thread):
                scheduling.join(self._thread, min(JOIN_INTERVAL_S, self._limit_s))
                if (error := wait_registry.cancel_error(began_s)) is not None:
                    raise error
                if scheduling.runs(self._thread) and time.monotonic() - began_s > self._limit_s:
                    raise CollectiveTimeout(self._why_not_over())

    def _why_not_over(self) -> str:
        whom = self._wait_reason(None).awaited
        late = ranks_text(whom) if whom else "some rank"
        frame = sys._current_frames().get(self._thread.ident or 0)
        return (
            f"hvd.shutdown: not over after {self._limit_s:g} s (MPISGD_TIMEOUT_S): {late} has neither called "
            "it nor come to its end. The thread of this rank's engine is here (the innermost call last):\n"
            f"{stack_of(frame)}"
        )
