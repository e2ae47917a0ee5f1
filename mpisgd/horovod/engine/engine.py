"""`Engine`: runs operations once every member of their process set has submitted them.

    submit     into the queue, from any thread of this rank, in any order (`tensor_queue`)
                  |  a cycle is due when somebody waits, enough was submitted, or some time has passed;
                  |  the thread that waits runs it, else the progress thread (`progress_loop`)
    exchange   every rank sends what it has submitted since the last cycle (`exchange`)
                  |
    decide     all ranks come to the same decisions, in the same order (`request_table`)
                  |
    execute    what can be fused runs as one, on the process set's group (`executor`, `fusion`, `operations`)

No cycle runs without something to send, so an idle job sends nothing; a rank wakes the others (`wake_up`).
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpisgd import tracing
from mpisgd.arguments import ranks_text
from mpisgd.core import waiting
from mpisgd.core.wait_registry import WaitReason
from mpisgd.errors import MpisgdError
from mpisgd.horovod.engine import name_conflicts
from mpisgd.horovod.engine.entry import Entry, fail, to_internal_error
from mpisgd.horovod.engine.exchange import CycleMessage, exchange
from mpisgd.horovod.engine.executor import Executor
from mpisgd.horovod.engine.name_conflicts import RESOLVE, NameConflicts
from mpisgd.horovod.engine.process_set_table import ProcessSetTable
from mpisgd.horovod.engine.progress_loop import ProgressLoop
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.request_cache import RequestCache
from mpisgd.horovod.engine.request_table import JOIN, WORLD, RequestTable
from mpisgd.horovod.engine.settings import Settings
from mpisgd.horovod.engine.stall_inspector import EngineWait, StallInspector, main_stack
from mpisgd.horovod.engine.tensor_queue import TensorQueue
from mpisgd.horovod.engine.timeline import IMMEDIATE, EngineTimeline
from mpisgd.horovod.engine.wake_up import WakeUp
from mpisgd.horovod.exceptions import HorovodInternalError
from mpisgd.job.groups import open_group
from mpisgd.job.lifecycle import current_job

__all__ = ["Engine"]

CHECK_INTERVAL_S = 1.0  # how often a sleeping engine looks for stalls; more often where warnings come soon
LOSS_CHECK_INTERVAL_S = 0.05  # how often it looks for lost ranks where the job survives them
WITHDRAW = "withdraw"  # the kind of the request by which a rank withdraws another one


class Engine:
    """The negotiated operations of this rank. Making and closing one is collective over the job.

    Args:
        settings: see there.
        warn: called with a text when operations stall; on the first rank.

    Attributes:
        group: all ranks, for the cycles and for operations on all of them.
        num_joins: how often all ranks have joined.
        num_cycles: how many have run.
        executor: runs decided operations.
        queue: what this rank has submitted.
    """

    def __init__(self, settings: Settings, warn: Callable[[str], None]) -> None:
        job = current_job()
        self._limit_s = job.timeout_s
        self.group = open_group(range(job.world.size), name="horovod")
        self.num_joins = self.num_cycles = 0
        self._settings = settings
        self._communicator = self.group.queue.communicator.duplicate()
        self._local = self._communicator.same_host()
        self._wake_up = WakeUp(self._communicator, self._local, self.group.topology)
        self._departed: set[int] = set()
        self._request_table = RequestTable({WORLD: self.group.ranks})
        self._cache = RequestCache(settings.cache_capacity)
        self._timeline = EngineTimeline()
        self._process_sets = ProcessSetTable(self.group)
        self.queue = TensorQueue(settings, self._timeline)
        end_job = functools.partial(job.hooks.end_job, 1)
        self._stalls = StallInspector(settings, warn, end_job)
        self._engine_wait = EngineWait(settings, self.queue.pending)
        self.executor = Executor(
            self.queue,
            self._process_sets,
            self._request_table,
            self._cache,
            self._timeline,
            self._engine_wait,
            settings.fusion_bytes,
        )
        self._conflicts = NameConflicts()
        check_interval_s = LOSS_CHECK_INTERVAL_S if job.failure_detector is not None else CHECK_INTERVAL_S
        self._check_interval_s = min(check_interval_s, settings.shortest_stall_s / 4 or check_interval_s)
        self._progress = ProgressLoop(self, self.queue, self._wake_up)
        self._progress.start()

    # -- what any thread calls -------------------------------------------------------------------------

    @property
    def broken(self) -> BaseException | None:
        """Why nothing can be negotiated any more, None as long as it can."""
        return self.queue.broken

    def submit(self, entry: Entry, *, by_engine: bool = False) -> Entry:
        """Submit an operation, which runs once every member has submitted it; see `TensorQueue.add`."""
        if self.queue.add(entry, by_engine=by_engine):
            self._wake_up.wake_own()
        return entry

    def wait(self, entry: Entry) -> Any:
        """Return the result of an operation, once it has run. What was submitted before is sent at once."""
        if not entry.done.is_set():
            self._progress.until(entry)
        return entry.take_result()

    def perform(self, entry: Entry) -> Any:
        """Submit an operation, and return its result."""
        return self.wait(self.submit(entry))

    def join(self) -> int:
        """Take part in the others' operations without data until all ranks have joined; who was last."""
        rank: int = self.wait(self.queue.join())
        return rank

    def members(self, set_id: int) -> Sequence[int]:
        """Return the global ranks of a process set.

        Raises:
            ValueError: there is none of this number.
        """
        return self._process_sets.members(set_id)

    def find_set(self, ranks: Sequence[int]) -> int | None:
        """Return the number of the process set of these ranks, None if there is none."""
        return self._process_sets.find(ranks)

    def spans_hosts(self, set_id: int) -> bool:
        """Return whether the members of a process set that this rank is in are on several hosts."""
        group = self._process_sets.group(set_id)
        return group is not None and group.internode is not None

    def awaited(self, set_id: int, prefix: str) -> list[Request]:
        """Return what other members have submitted, and this rank has not, under names with this prefix."""
        with self._progress.lock:
            return self._request_table.waiting_for(self.group.rank, set_id, prefix)

    def add_set(self, ranks: Sequence[int]) -> int:
        """Add a process set, and return its number. Collective over the job.

        Raises:
            HorovodInternalError: the ranks do not all ask for the same change at the same time.
        """
        request = Request("add_process_set.sets", "add_process_set", ranks=tuple(ranks))
        set_id: int = self.perform(Entry(request))
        return set_id

    def remove_set(self, set_id: int, ranks: Sequence[int]) -> None:
        """Remove a process set; what is pending in it fails. Collective over the job; see `add_set`."""
        kind = "remove_process_set"
        self.perform(Entry(Request(f"{kind}.sets", kind, root=set_id, ranks=tuple(ranks))))

    def close(self) -> None:
        """Submit nothing any more, and return when no rank does. Collective.

        Raises:
            HorovodInternalError: not all ranks have come to their end within the job's time limit, or some
                wait for ever, for this one too. The engine is aborted then, and so should the job be.
        """
        self.queue.leave()
        try:
            self._progress.finish(self._limit_s)
        except MpisgdError as exc:
            self.abort(exc)
            raise to_internal_error(exc) from None
        finally:
            self._engine_wait.close()
        self._wake_up.close()
        if self.broken is None:
            self._process_sets.close()
            self._local.free()
            self._communicator.free()

    def abandon(self, why: MpisgdError) -> None:
        """End without the other ranks; what is under way fails, as it has on the ranks that are left."""
        if self.broken is None:
            self.abort(why)
        self.close()

    # -- in a cycle ------------------------------------------------------------------------------------

    def is_finished(self) -> bool:
        """Return whether no rank submits anything any more."""
        return self.broken is not None or len(self._departed) == self.group.size

    def is_cycle_due(self) -> bool:
        """Return whether this rank or another has something to send."""
        return (
            self._wake_up.requested_cycle() > self.num_cycles
            or self._stalls.wants_stacks
            or self.queue.is_due()
        )

    def run_one(self) -> None:
        """Exchange what the ranks have submitted, and run what can run because of it."""
        everyone = self._exchange()
        for rank, message in enumerate(everyone):
            self._note(rank, message)
        self.executor.execute(self._request_table.decide())
        self._resolve_conflicts(everyone)
        if (last := self._request_table.all_joined()) is not None:
            self.num_joins += 1
            self.queue.end_join(last)
        if self._departed:
            self._reject_what_waits_for_the_departed()

    def _exchange(self) -> list[CycleMessage]:
        cycle = self.num_cycles + 1
        if self._wake_up.requested_cycle() < cycle:
            self._wake_up.wake_others(cycle)
        self._timeline.cycle()
        self._engine_wait.enter("the negotiation of operations", self.group)
        with tracing.purpose("negotiation", "negotiate"):
            mine = self.queue.take_message(wants_stacks=self._stalls.wants_stacks)
            everyone = exchange(mine, self._cache, self.group, main_stack)
        self._engine_wait.leave()
        self.num_cycles = cycle
        if self._stalls.wants_stacks:
            self._stalls.report({rank: message.stack for rank, message in enumerate(everyone)})
        return everyone

    def _note(self, rank: int, message: CycleMessage) -> None:
        self._timeline.heard(message.requests)
        for request in message.requests:
            if request.kind in IMMEDIATE:
                self.executor.execute_immediately(request)
            elif request.kind == WITHDRAW:
                self._note_withdrawn(rank, request)
            elif request.kind != RESOLVE:
                self._request_table.submit(rank, request)
        if message.joined:
            self._request_table.join(rank)
        if message.leaving:
            self._departed.add(rank)

    def _note_withdrawn(self, rank: int, request: Request) -> None:
        key = request.set_id, request.op
        self._request_table.withdraw(rank, key)
        if rank == self.group.rank:
            self.queue.take(request)
            if (entry := self.queue.withdraw(key)) is not None:
                fail([entry], entry.deadlock or MpisgdError("withdrawn"))

    def _resolve_conflicts(self, everyone: Sequence[CycleMessage]) -> None:
        """Resolve the name conflicts that the first rank has asked to be resolved."""
        for request in everyone[0].requests:
            if request.kind == RESOLVE:
                self.executor.execute(self._request_table.resolve(request.set_id, request.op))
                self.queue.take(request)

    def _reject_what_waits_for_the_departed(self) -> None:
        """Fail what waits for a rank that has shut down, and the join if it has not joined."""
        if never := self._departed - self._request_table.joined:
            self._request_table.unjoin()
            text = f"join: {ranks_text(never)} has shut down without joining"
            self.queue.end_join(error=HorovodInternalError(text))
        for request, missing in self._request_table.waiting():
            if gone := missing & self._departed:
                self._request_table.drop(request)
                text = f"tensor {request.label!r}: {ranks_text(gone)} has shut down without submitting it"
                self.executor.reject(request, text)

    def run_checks(self) -> None:
        """See whether operations wait for too long, or for lost ranks."""
        if (error := waiting.cancel_reason()) is not None:
            raise error
        if self.group.rank == 0:
            now_s = time.monotonic()
            for entry in self._conflicts.check(self._request_table.name_conflicts(), now_s):
                self.submit(entry, by_engine=True)
            if self._settings.shortest_stall_s:
                self._stalls.check(self._request_table.waiting(), now_s)

    def check_interval_s(self) -> float:
        """Return how soon to run the checks again."""
        return name_conflicts.GRACE_S / 4 if self._conflicts.any() else self._check_interval_s

    # -- deadlocks and failures ------------------------------------------------------------------------

    def can_progress(self) -> bool:
        """Return whether a cycle runs, or will without anyone's submitting anything; from any thread.

        An idle engine cannot do anything by itself: what it waits for, other ranks' programs must do.
        """
        if not self._progress.lock.acquire(blocking=False):
            return True
        try:
            is_idle = self.num_cycles >= self._wake_up.known_cycle() and not self.queue.has_unsent()
            return not is_idle or self._stalls.wants_stacks or bool(self._request_table.name_conflicts())
        finally:
            self._progress.lock.release()

    def wait_hint(self, entry: Entry | None) -> WaitReason:
        """Tell for whom an operation waits, or, of None, the shutdown; not known while a cycle runs."""
        request = None if entry is None else entry.request
        whom: frozenset[int] = frozenset()
        if self._progress.lock.acquire(blocking=False):
            try:
                if request is None:
                    whom = frozenset(self.group.ranks) - self._departed
                else:
                    whom = self._request_table.missing(request.key)
            finally:
                self._progress.lock.release()
        whom -= {self.group.rank}
        return WaitReason(_words_of(request), awaited=tuple(sorted(whom)))

    def withdraw(self, entry: Entry, error: Exception) -> None:
        """Fail an operation that is part of a deadlock; the other ranks' part in it stays pending.

        The request goes through a cycle, so that all ranks learn of it at the same place of their order, and
        whatever they submit from then on works.
        """
        request = entry.request
        if entry.deadlock is None:
            name = f"{WITHDRAW}.{request.set_id}.{request.name}"
            entry.deadlock = HorovodInternalError(str(error))
            withdrawal = Request(name, WITHDRAW, request.set_id, op=request.name)
            self.submit(Entry(withdrawal), by_engine=True)

    def abort(self, exc: BaseException) -> None:
        """Fail everything that is pending, or ever will be."""
        self._engine_wait.leave()
        fail(self.queue.close(exc), exc)


def _words_of(request: Request | None) -> str:
    """Return the name of the call that waits."""
    if request is None:
        return "hvd.shutdown"
    return "hvd.join" if request.key == JOIN.key else f"hvd.{request.kind} {request.label!r}"
