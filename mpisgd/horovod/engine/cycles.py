"""`Cycles`: what the ranks of a job do together, in one thread of each rank at a time.

No cycle runs without something to send, so an idle job sends nothing; a rank wakes the others (`wake_up`).
"""

import functools
import time
from collections.abc import Callable, Sequence

import torch

from mpisgd import tracing
from mpisgd.arguments import ranks_text
from mpisgd.collectives.objects import all_gather_object
from mpisgd.core.group import Group
from mpisgd.errors import MpisgdError
from mpisgd.horovod.engine import stall_inspector
from mpisgd.horovod.engine.entry import Entry, fail
from mpisgd.horovod.engine.operations import perform_operation
from mpisgd.horovod.engine.request import Request, RequestCache, exchange
from mpisgd.horovod.engine.request_table import WORLD, Decision, RequestTable, fuse
from mpisgd.horovod.engine.settings import Settings
from mpisgd.horovod.engine.stall_inspector import NameConflicts, StallInspector, engine_wait, main_stack
from mpisgd.horovod.engine.tensor_queue import LEAVE, TensorQueue
from mpisgd.horovod.engine.timeline import EngineTimeline, change_timeline
from mpisgd.horovod.engine.wake_up import WakeUp
from mpisgd.horovod.exceptions import HorovodInternalError
from mpisgd.job.groups import close_group, open_group
from mpisgd.job.world import Job
from mpisgd.threads import waiting

__all__ = ["RESOLVE", "WITHDRAW", "Cycles", "ProcessSetTable"]

CHECK_INTERVAL_S = 1.0  # how often a sleeping engine looks for stalls; more often where warnings come soon
LOSS_CHECK_INTERVAL_S = 0.05  # how often it looks for lost ranks where the job survives them
WITHDRAW = "withdraw"  # the kind of the request by which a rank withdraws another one
RESOLVE = "resolve"  # the kind of the request by which the first rank has a conflict of names resolved
STACKS = Request("stacks", "stacks")  # asks for everyone's Python stack


class ProcessSetTable:
    """The process sets by number: the same on all ranks, but for the groups, which only members have.

    Args:
        world: the group of all ranks.

    Attributes:
        members: the global ranks of each set.
        groups: the groups of those that this rank is in.
    """

    def __init__(self, world: Group) -> None:
        self.members: dict[int, Sequence[int]] = {WORLD: world.ranks}
        self.groups: dict[int, Group] = {WORLD: world}
        self._rank, self._job = world.rank, world.job
        self._num_made = 1

    def find(self, ranks: Sequence[int]) -> int | None:
        """Return the number of the process set of these ranks, None if there is none; from any thread."""
        known = list(self.members.items())
        return next((set_id for set_id, members in known if list(members) == list(ranks)), None)

    def add(self, ranks: Sequence[int]) -> int:
        """Make a process set, and return its number. Collective over the job."""
        set_id = self._num_made
        self._num_made += 1
        if self._rank in ranks:
            self.groups[set_id] = open_group(self._job, ranks, name=f"process set {set_id}")
        self.members[set_id] = ranks
        return set_id

    def remove(self, set_id: int) -> None:
        """Remove a process set. Collective over the job."""
        self.members.pop(set_id, None)
        if (group := self.groups.pop(set_id, None)) is not None:
            close_group(group)

    def close(self) -> None:
        """Close the groups of all process sets. Collective over the job."""
        for group in self.groups.values():
            close_group(group)


class Cycles:
    """The negotiation of one rank. Making and closing one is collective over the job.

    Args:
        job: whose ranks negotiate.
        settings: see there.
        warn: called with a text when operations stall; on the first rank.

    Attributes:
        job: as given.
        group: all ranks, for the cycles and for operations on all of them.
        num_joins: how often all ranks have joined.
        num_cycles: how many have run.
        fusion_bytes: all-reductions are fused up to this size.
        process_sets: where operations run.
        queue: what this rank has submitted.
        wake_up: where threads sleep until there is something to do.
    """

    def __init__(self, job: Job, settings: Settings, warn: Callable[[str], None]) -> None:
        self.job = job
        self.group = open_group(job, range(job.world.size), name="horovod")
        self.num_joins = self.num_cycles = 0
        self._settings = settings
        self._communicator = self.group.queue.communicator.duplicate()
        self._local = self._communicator.same_host()
        self.wake_up = WakeUp(self._communicator, self._local, self.group.topology)
        self._departed: set[int] = set()
        self.process_sets = ProcessSetTable(self.group)
        self._request_table = RequestTable(self.process_sets.members)
        self._cache = RequestCache(settings.cache_capacity)
        self._timeline = EngineTimeline()
        self.queue = TensorQueue(settings)
        self.fusion_bytes = settings.fusion_bytes
        self._devices: dict[str, torch.device] = {}  # see `perform_operation`
        self._stalls = StallInspector(settings, warn, functools.partial(job.end, 1))
        self._conflicts = NameConflicts()
        check_interval_s = LOSS_CHECK_INTERVAL_S if job.failure_detector is not None else CHECK_INTERVAL_S
        self._check_interval_s = min(check_interval_s, settings.shortest_stall_s / 4 or check_interval_s)
        # As long as the engine runs the job's own waits stall by Horovod's settings.
        self._watchdog = None if job.monitor is None else job.monitor.watchdog
        if self._watchdog is not None:
            self._job_limits_s = self._watchdog.warning_s, self._watchdog.abort_s
            self._watchdog.warning_s, self._watchdog.abort_s = settings.stall_warning_s, settings.stall_end_s

    def submit(self, entry: Entry, *, by_engine: bool = False) -> Entry:
        """Submit an operation, which runs once every member has submitted it; see `TensorQueue.add`."""
        if self.queue.add(entry, by_engine=by_engine):
            self.wake_up.wake_own()
        return entry

    def abort(self, exc: BaseException) -> None:
        """Run no cycle any more, and fail everything that is pending, or ever will be."""
        fail(self.queue.close(exc), exc)

    def is_finished(self) -> bool:
        """Return whether no rank submits anything any more."""
        return self.queue.broken is not None or len(self._departed) == self.group.size

    def is_cycle_due(self) -> bool:
        """Return whether this rank or another has something to send."""
        return (
            self.wake_up.requested_cycle() > self.num_cycles
            or self._stalls.wants_stacks
            or self.queue.is_due()
        )

    def run_one(self) -> None:
        """Exchange what the ranks have submitted, and run what can run because of it."""
        everyone = self._exchange()
        for rank, requests in enumerate(everyone):
            self._timeline.heard(requests)
            for request in requests:
                self._note(rank, request)
        while decisions := self._request_table.decide():  # once more, where process sets were removed
            self._execute(decisions)
            for decision in decisions:
                if decision.error is None and not decision.absent:  # who has joined would not know it again
                    self._cache.use(decision.request)
        for request in everyone[0]:
            if request.kind == RESOLVE:
                self._execute(self._request_table.resolve(request.set_id, request.op))
                self.queue.take(request.key)
        if (last := self._request_table.all_joined()) is not None:
            self.num_joins += 1
            self.queue.end_join(last)
        if self._departed:
            self._reject_what_waits_for_the_departed()

    def _exchange(self) -> list[list[Request]]:
        cycle = self.num_cycles + 1
        if self.wake_up.requested_cycle() < cycle:
            self.wake_up.wake_others(cycle)
        self._timeline.cycle()
        waits = engine_wait("the negotiation of operations", self.group, self.queue.pending)
        with waits, tracing.purpose("negotiation", "negotiate"):
            mine = self.queue.take_new() + [STACKS] * self._stalls.wants_stacks
            everyone = exchange(mine, self._cache, self.group)
            self.num_cycles = cycle
            if STACKS in everyone[0]:
                stacks = [""] * self.group.size
                all_gather_object(stacks, main_stack(), self.group)
                if self.group.rank == 0:
                    self._stalls.report(dict(enumerate(stacks)))
        return everyone

    def _note(self, rank: int, request: Request) -> None:
        """Put what a rank has sent into the table, or do at once what needs no other rank's consent."""
        if request.kind in ("start_timeline", "stop_timeline"):
            self._change_timeline(request)
        elif request.kind == WITHDRAW:
            self._note_withdrawn(rank, request)
        elif request == LEAVE:
            self._departed.add(rank)
        elif request.kind != RESOLVE and request != STACKS:
            self._request_table.submit(rank, request)

    def _change_timeline(self, request: Request) -> None:
        error: MpisgdError | None = None
        try:
            change_timeline(request, self.group)
        except MpisgdError as exc:  # raised on all ranks alike, and only one may wait
            error = exc
        self.queue.complete(request.key, error=error)

    def _note_withdrawn(self, rank: int, request: Request) -> None:
        key = request.set_id, request.op
        self._request_table.withdraw(rank, key)
        if rank == self.group.rank:
            self.queue.take(request.key)
            if (entry := self.queue.take(key)) is not None:
                fail([entry], entry.deadlock or MpisgdError("withdrawn"))

    def _execute(self, decisions: Sequence[Decision]) -> None:
        """Run operations, fused where they can be; fail those that the ranks do not agree on."""
        self._timeline.decided()
        good = [decision for decision in decisions if decision.error is None]
        for decision in decisions:
            if decision.error is not None:
                self.queue.complete(decision.request.key, error=HorovodInternalError(decision.error))
        for batch in fuse(good, [decision.request.nbytes for decision in good], self.fusion_bytes):
            self._execute_batch(batch)

    def _execute_batch(self, batch: Sequence[Decision]) -> None:
        requests = [decision.request for decision in batch]
        entries: list[Entry | None] = []
        try:
            entries += [self.queue.take(request.key) for request in requests]
            group = self.process_sets.groups.get(requests[0].set_id)
            timeline = self._timeline.batch(batch, entries, group)
            if requests[0].kind in ("add_process_set", "remove_process_set"):
                self._change_sets(requests[0], entries[0])
            elif group is not None:
                waits = engine_wait(str(requests[0]), group, self.queue.pending)
                with waits, torch.no_grad(), tracing.purpose("carried"):
                    perform_operation(requests, entries, group, self._devices, timeline.step)
                    timeline.end()
            else:  # this rank has no part in them, unless the set was removed in this very cycle
                removed = HorovodInternalError(f"{requests[0]}: its process set was removed")
                fail(filter(None, entries), removed)
        except BaseException as exc:  # entries that were taken are not in the queue any more
            fail(filter(None, entries), exc)
            raise

    def _change_sets(self, request: Request, entry: Entry | None) -> None:
        """Add or remove a process set, at the same place of the order on all ranks."""
        if request.kind == "add_process_set":
            set_id = self.process_sets.add(request.ranks)
        else:
            set_id = request.root
            self.process_sets.remove(set_id)
        if entry is not None:
            entry.complete(set_id)

    def _reject_what_waits_for_the_departed(self) -> None:
        """Fail what waits for a rank that has shut down, and the join if it has not joined."""
        if never := self._departed - self._request_table.joined.keys():
            self._request_table.joined.clear()
            text = f"join: {ranks_text(never)} has shut down without joining"
            self.queue.end_join(error=HorovodInternalError(text))
        for request, missing in self._request_table.waiting():
            if gone := missing & self._departed:
                self._request_table.drop(request)
                text = f"tensor {request.label!r}: {ranks_text(gone)} has shut down without submitting it"
                self.queue.complete(request.key, error=HorovodInternalError(text))

    def run_checks(self) -> None:
        """See whether operations wait for too long, or for lost ranks."""
        if (error := waiting.cancel_reason()) is not None:
            raise error
        if self.group.rank != 0:
            return
        now_s = time.monotonic()
        for set_id, label in self._conflicts.check(self._request_table.name_conflicts(), now_s):
            resolving = Request(f"{RESOLVE}.{set_id}.{label}", RESOLVE, set_id, op=label)
            self.submit(Entry(resolving), by_engine=True)
        if self._settings.shortest_stall_s:
            self._stalls.check(self._request_table.waiting(), now_s)

    def check_interval_s(self) -> float:
        """Return how soon to run the checks again."""
        return stall_inspector.GRACE_S / 4 if self._conflicts.since_s else self._check_interval_s
