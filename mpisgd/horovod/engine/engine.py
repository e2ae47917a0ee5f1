"""`Engine`: runs operations once every member of their process set has submitted them.

    submit     into the `outbox`, from any thread of this rank, in any order
                  |  somebody waits, or enough came together, or it has been a while: whose turn it is
                  |  to run the cycle is another question (`turns`)
    cycle      every rank tells what it has submitted since the last one (`cycle`)
                  |
    decide     all ranks come to the same decisions, in the same order (`table`)
                  |
    carry out  what can run together, on the process set's group (`carrier`, `fusing`, `perform`)

No cycle runs without news, so an idle job sends nothing; a rank that has some wakes the others (`doorbell`).
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpisgd import tracing
from mpisgd.core import waiting
from mpisgd.core.wait_registry import WaitReason
from mpisgd.errors import MpisgdError
from mpisgd.horovod.engine import clashes
from mpisgd.horovod.engine.cache import Cache
from mpisgd.horovod.engine.carrier import Carrier
from mpisgd.horovod.engine.clashes import SETTLE, Clashes
from mpisgd.horovod.engine.cycle import News, exchange
from mpisgd.horovod.engine.doorbell import Doorbell
from mpisgd.horovod.engine.entry import Entry, as_horovods, fail
from mpisgd.horovod.engine.outbox import Outbox
from mpisgd.horovod.engine.record import Record
from mpisgd.horovod.engine.recording import AT_ONCE
from mpisgd.horovod.engine.request import Request, ranks_text
from mpisgd.horovod.engine.sets import ProcessSets
from mpisgd.horovod.engine.settings import Settings
from mpisgd.horovod.engine.stalls import Stalls, Watchdog, main_stack
from mpisgd.horovod.engine.table import JOIN, WORLD, Table
from mpisgd.horovod.engine.turns import Turns
from mpisgd.horovod.exceptions import HorovodInternalError
from mpisgd.job.groups import open_group
from mpisgd.job.lifecycle import current_job

__all__ = ["Engine"]

ALARM_S = 1.0  # how often a sleeping engine looks for stalls, or more often if they are soon told of
NOTICE_S = 0.05  # how often it looks for lost ranks where the job outlives them
TAKE_BACK = "take_back"  # the kind of what tells that a rank no longer takes part in what it has submitted


class Engine:
    """The negotiated operations of this rank. Making and closing one is collective over the job.

    Args:
        settings: see there.
        warn: called with a text when operations stall; on the first rank.

    Attributes:
        group: all ranks, for the cycles and for operations on all of them.
        num_joins: how often all ranks have joined.
        num_cycles: how many have run.
        carrier: of what was decided.
        outbox: of this rank.
    """

    def __init__(self, settings: Settings, warn: Callable[[str], None]) -> None:
        job = current_job()
        self._limit_s = job.timeout_s
        self.group = open_group(range(job.world.size), name="horovod")
        self.num_joins = self.num_cycles = 0
        self._settings = settings
        self._wire = self.group.queue.wire.duplicate()
        self._local = self._wire.same_host()
        self._bell = Doorbell(self._wire, self._local, self.group.topology)
        self._left: set[int] = set()
        self._table = Table({WORLD: self.group.ranks})
        self._cache = Cache(settings.cache_capacity)
        self._record = Record()
        self._sets = ProcessSets(self.group)
        self.outbox = Outbox(settings, self._record)
        end_job = functools.partial(job.hooks.end_job, 1)
        self._stalls = Stalls(settings, warn, end_job)
        self._watchdog = Watchdog(settings, self.outbox.pending)
        self.carrier = Carrier(
            self.outbox,
            self._sets,
            self._table,
            self._cache,
            self._record,
            self._watchdog,
            settings.fusion_bytes,
        )
        self._clashes = Clashes()
        alarm_s = NOTICE_S if job.failure_detector is not None else ALARM_S
        self._alarm_s = min(alarm_s, settings.shortest_stall_s / 4 or alarm_s)
        self._turns = Turns(self, self.outbox, self._bell)
        self._turns.start()

    # -- what any thread calls -------------------------------------------------------------------------

    @property
    def broken(self) -> BaseException | None:
        """Why nothing can be negotiated any more, None as long as it can."""
        return self.outbox.broken

    def submit(self, entry: Entry) -> Entry:
        """Let an operation run once every member has submitted it.

        Raises:
            ValueError: one of this name is pending.
            HorovodInternalError: the engine was closed, here or by another rank's failure.
        """
        return self._submit(entry)

    def _submit(self, entry: Entry, *, by_engine: bool = False) -> Entry:
        if self.outbox.add(entry, by_engine=by_engine):
            self._bell.ring_own()
        return entry

    def wait(self, entry: Entry) -> Any:
        """Return the result of an operation, once it has run. What was submitted before goes out at once."""
        if not entry.done.is_set():
            self._turns.until(entry)
        return entry.take_result()

    def join(self) -> int:
        """Take part in the others' operations without data until all ranks have joined; who was last."""
        rank: int = self.wait(self.outbox.join())
        return rank

    def members(self, set_id: int) -> Sequence[int]:
        """Return the global ranks of a process set.

        Raises:
            ValueError: there is none of this number.
        """
        return self._sets.members(set_id)

    def find_set(self, ranks: Sequence[int]) -> int | None:
        """Return the number of the process set of these ranks, None if there is none."""
        return self._sets.find(ranks)

    def spans_hosts(self, set_id: int) -> bool:
        """Return whether the members of a process set that this rank is in are on several hosts."""
        group = self._sets.group(set_id)
        return group is not None and group.internode is not None

    def awaited(self, set_id: int, prefix: str) -> list[Request]:
        """Return what other members have submitted, and this rank has not, under names that begin so."""
        with self._turns.lock:
            return self._table.waiting_for(self.group.rank, set_id, prefix)

    def add_set(self, ranks: Sequence[int]) -> int:
        """Make a process set, and return its number. Collective over the job.

        Raises:
            HorovodInternalError: the ranks do not all ask for the same change at the same time.
        """
        set_id: int = self._change(Request("add_process_set.sets", "add_process_set", ranks=tuple(ranks)))
        return set_id

    def remove_set(self, set_id: int, ranks: Sequence[int]) -> None:
        """Give a process set back; what is pending in it fails. Collective over the job; see `add_set`."""
        kind = "remove_process_set"
        self._change(Request(f"{kind}.sets", kind, root=set_id, ranks=tuple(ranks)))

    def _change(self, request: Request) -> Any:
        return self.wait(self.submit(Entry(request)))

    def close(self) -> None:
        """Submit nothing any more, and return when no rank does. Collective.

        Raises:
            HorovodInternalError: not all ranks have come to their end within the job's time limit, or some
                wait for ever, for this one too. The engine is given up then, and so should the job be.
        """
        self.outbox.leave()
        try:
            self._turns.finish(self._limit_s)
        except MpisgdError as exc:
            self.give_up(exc)
            raise as_horovods(exc) from None
        finally:
            self._watchdog.close()
        self._bell.close()
        if self.broken is None:
            self._sets.close()
            self._local.free()
            self._wire.free()

    def abandon(self, why: MpisgdError) -> None:
        """End without meeting anyone; what is under way fails, as it has on the ranks that are left."""
        if self.broken is None:
            self.give_up(why)
        self.close()

    # -- in turns --------------------------------------------------------------------------------------

    def are_over(self) -> bool:
        """Return whether no rank submits anything any more."""
        return self.broken is not None or len(self._left) == self.group.size

    def are_wanted(self) -> bool:
        """Return whether this rank or another has something to tell."""
        return self._bell.wanted() > self.num_cycles or self._stalls.asks or self.outbox.is_due()

    def run_one(self) -> None:
        """Hear what all ranks have to tell, and carry out what can be done because of it."""
        everyone = self._hear_everyone()
        for rank, news in enumerate(everyone):
            self._note(rank, news)
        self.carrier.carry_out(self._table.decide())
        self._settle_clashes(everyone)
        if (last := self._table.all_joined()) is not None:
            self.num_joins += 1
            self.outbox.end_join(last)
        if self._left:
            self._refuse_what_waits_for_the_left()

    def _hear_everyone(self) -> list[News]:
        cycle = self.num_cycles + 1
        if self._bell.wanted() < cycle:
            self._bell.ring_others(cycle)
        self._record.cycle()
        self._watchdog.enter("the exchange of what is to be done", self.group)
        with tracing.purpose("negotiation", "negotiate"):
            news = self.outbox.take_news(asks=self._stalls.asks)
            everyone = exchange(news, self._cache, self.group, main_stack)
        self._watchdog.leave()
        self.num_cycles = cycle
        if self._stalls.asks:
            self._stalls.tell({rank: news.stack for rank, news in enumerate(everyone)})
        return everyone

    def _note(self, rank: int, news: News) -> None:
        self._record.heard(news.requests)
        for request in news.requests:
            if request.kind in AT_ONCE:
                self.carrier.do_at_once(request)
            elif request.kind == TAKE_BACK:
                self._note_taken_back(rank, request)
            elif request.kind != SETTLE:
                self._table.submit(rank, request)
        if news.joined:
            self._table.join(rank)
        if news.leaving:
            self._left.add(rank)

    def _note_taken_back(self, rank: int, request: Request) -> None:
        key = request.set_id, request.op
        self._table.take_back(rank, key)
        if rank == self.group.rank:
            self.outbox.take(request)
            if (entry := self.outbox.take_back(key)) is not None:
                fail([entry], entry.verdict or MpisgdError("taken back"))

    def _settle_clashes(self, everyone: Sequence[News]) -> None:
        """Do what the first rank has asked for."""
        for request in everyone[0].requests:
            if request.kind == SETTLE:
                self.carrier.carry_out(self._table.settle(request.set_id, request.op))
                self.outbox.take(request)

    def _refuse_what_waits_for_the_left(self) -> None:
        """Nobody who has left will submit what others wait for, or join."""
        if never := self._left - self._table.joined:
            self._table.unjoin()
            text = f"join: {ranks_text(never)} has shut down without joining"
            self.outbox.end_join(error=HorovodInternalError(text))
        for request, missing in self._table.waiting():
            if gone := missing & self._left:
                self._table.withdraw(request)
                text = f"tensor {request.label!r}: {ranks_text(gone)} has shut down without submitting it"
                self.carrier.refuse(request, text)

    def look_around(self) -> None:
        """See whether operations wait for too long, or for ranks that are gone."""
        if (error := waiting.cancel_reason()) is not None:
            raise error
        if self.group.rank == 0:
            now_s = time.monotonic()
            for entry in self._clashes.look(self._table.clashes(), now_s):
                self._submit(entry, by_engine=True)
            if self._settings.shortest_stall_s:
                self._stalls.look(self._table.waiting(), now_s)

    def look_again_s(self) -> float:
        """Return how soon to look around again."""
        return clashes.PATIENCE_S / 4 if self._clashes.any() else self._alarm_s

    # -- where nothing goes on -------------------------------------------------------------------------

    def may_go_on(self) -> bool:
        """Return whether a cycle runs, or will without anyone's submitting anything; from any thread.

        An engine without news is not able to do anything: what it waits for, other ranks' programs must do.
        """
        if not self._turns.lock.acquire(blocking=False):
            return True
        try:
            told = self.num_cycles >= self._bell.has_rung() and not self.outbox.has_news()
            return not told or self._stalls.asks or bool(self._table.clashes())
        finally:
            self._turns.lock.release()

    def about(self, entry: Entry | None) -> WaitReason:
        """Tell for whom an operation waits, or, of None, the end; whom nobody knows while a cycle runs."""
        request = None if entry is None else entry.request
        whom: frozenset[int] = frozenset()
        if self._turns.lock.acquire(blocking=False):
            try:
                everyone = frozenset(self.group.ranks)
                whom = everyone - self._left if request is None else self._table.missing(request.key)
            finally:
                self._turns.lock.release()
        whom -= {self.group.rank}
        return WaitReason(_words_of(request), awaited=tuple(sorted(whom)))

    def take_back(self, entry: Entry, error: Exception) -> None:
        """Let an operation fail that has been found to wait for ever; the others' part in it stays.

        That goes through a cycle, so that all ranks come to know it at the same place of their order, and
        whatever they submit from then on works.
        """
        request = entry.request
        if entry.verdict is None:
            name = f"{TAKE_BACK}.{request.set_id}.{request.name}"
            entry.verdict = HorovodInternalError(str(error))
            taken = Request(name, TAKE_BACK, request.set_id, op=request.name)
            self._submit(Entry(taken), by_engine=True)

    def give_up(self, exc: BaseException) -> None:
        """Let everyone who waits, or ever will, know why."""
        self._watchdog.leave()
        fail(self.outbox.close(exc), exc)


def _words_of(request: Request | None) -> str:
    """Return what a program calls what it waits in."""
    if request is None:
        return "hvd.shutdown"
    return "hvd.join" if request.key == JOIN.key else f"hvd.{request.kind} {request.label!r}"
