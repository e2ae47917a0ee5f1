"""`Carrier`: carries out what the ranks have decided, in the same order on all of them."""

from collections.abc import Sequence

import torch

from mpisgd import tracing
from mpisgd.core.group import Group
from mpisgd.errors import MpisgdError
from mpisgd.horovod.engine.cache import Cache
from mpisgd.horovod.engine.entry import Entry, fail
from mpisgd.horovod.engine.fusing import fuse
from mpisgd.horovod.engine.memory import Memory
from mpisgd.horovod.engine.outbox import Outbox
from mpisgd.horovod.engine.perform import perform
from mpisgd.horovod.engine.record import Batch, Record
from mpisgd.horovod.engine.recording import AT_ONCE
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.sets import ProcessSets
from mpisgd.horovod.engine.stalls import Watchdog
from mpisgd.horovod.engine.table import WORLD, Decision, Table
from mpisgd.horovod.exceptions import HorovodInternalError

__all__ = ["Carrier"]


class Carrier:
    """Does what was decided, and completes the entries.

    Args:
        outbox: where this rank's entries are.
        sets: the process sets, which it makes and gives back.
        table: told of them.
        cache: given the requests that have run.
        record: told of what runs.
        watchdog: likewise.
        fusion_bytes: all-reductions travel together up to this size.
    """

    def __init__(
        self,
        outbox: Outbox,
        sets: ProcessSets,
        table: Table,
        cache: Cache,
        record: Record,
        watchdog: Watchdog,
        fusion_bytes: int,
    ) -> None:
        self._outbox = outbox
        self._sets = sets
        self._table = table
        self._cache = cache
        self._record = record
        self._watchdog = watchdog
        self.fusion_bytes = fusion_bytes
        self._memory = Memory()

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        """Do what can be done together as one, and refuse what is wrong."""
        self._record.decided()
        good = [decision for decision in decisions if decision.error is None]
        for decision in decisions:
            if decision.error is not None:
                self.refuse(decision.request, decision.error)
        for batch in fuse(good, [decision.request.nbytes for decision in good], self.fusion_bytes):
            self._carry_out_together(batch)
            for decision in batch:
                if not decision.absent:  # a rank that has joined would not know the name again
                    self._cache.use(decision.request)

    def refuse(self, request: Request, text: str) -> None:
        """Let who waits for an operation know that nobody does it."""
        if (entry := self._outbox.take(request)) is not None:
            entry.complete(error=HorovodInternalError(text))

    def do_at_once(self, request: Request) -> None:
        """Do on all ranks what one of them has asked for."""
        error: MpisgdError | None = None
        world = self._sets.group(WORLD)
        assert world is not None
        try:
            AT_ONCE[request.kind](request, world.queue.wire)
        except MpisgdError as exc:  # it comes to all ranks alike, and to who has asked
            error = exc
        if (entry := self._outbox.take(request)) is not None:
            entry.complete(error=error)

    def _carry_out_together(self, batch: Sequence[Decision]) -> None:
        requests = [decision.request for decision in batch]
        entries = [self._outbox.take(request) for request in requests]
        group = self._sets.group(requests[0].set_id)
        record = self._record.batch(batch, group)
        if requests[0].kind in ("add_process_set", "remove_process_set"):
            self._change_sets(requests[0], entries[0])
        elif group is not None:
            try:
                self._perform(requests, entries, group, record)
            except BaseException as exc:  # nobody else knows of entries that were taken
                fail(filter(None, entries), exc)
                raise

    def _perform(
        self,
        requests: Sequence[Request],
        entries: Sequence[Entry | None],
        group: Group,
        record: Batch | None,
    ) -> None:
        """Perform, in the sight of the watchdog and of the timeline."""
        self._watchdog.enter(f"{requests[0].kind} {requests[0].label!r}", group)
        with torch.no_grad(), tracing.purpose("carried"):
            if record is None:
                perform(requests, entries, group, self._memory)
            else:
                own = [
                    {"bytes": entry.nbytes, **entry.contents} if entry else {"bytes": 0} for entry in entries
                ]
                perform(requests, entries, group, self._memory, record.step)
                record.ends(own)
        self._watchdog.leave()

    def _change_sets(self, request: Request, entry: Entry | None) -> None:
        """Make a process set or give it back, at the same place of the order on all ranks."""
        if request.kind == "add_process_set":
            set_id = self._sets.add(request.ranks)
            self._table.add_set(set_id, request.ranks)
        else:
            set_id = request.root
            self._table.remove_set(set_id)
            self._sets.remove(set_id)
            self.carry_out(self._table.decide())  # what is pending in it, which nobody can do any more
        if entry is not None:
            entry.complete(set_id)
