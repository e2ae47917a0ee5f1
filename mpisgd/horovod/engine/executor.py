"""`Executor`: runs the operations that the ranks have decided on, in the same order on all of them."""

from collections.abc import Sequence

import torch

from mpisgd import tracing
from mpisgd.core.group import Group
from mpisgd.errors import MpisgdError
from mpisgd.horovod.engine.entry import Entry, fail
from mpisgd.horovod.engine.fusion import fuse
from mpisgd.horovod.engine.operations import perform_operation
from mpisgd.horovod.engine.process_set_table import ProcessSetTable
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.request_cache import RequestCache
from mpisgd.horovod.engine.request_table import WORLD, Decision, RequestTable
from mpisgd.horovod.engine.stall_inspector import EngineWait
from mpisgd.horovod.engine.tensor_queue import TensorQueue
from mpisgd.horovod.engine.timeline import IMMEDIATE, BatchTimeline, EngineTimeline
from mpisgd.horovod.exceptions import HorovodInternalError

__all__ = ["Executor"]


class Executor:
    """Runs decided operations, and completes their entries.

    Args:
        queue: this rank's entries.
        process_sets: where operations run; it adds and removes them.
        request_table: told of added and removed process sets.
        cache: given the requests that have run.
        timeline: told of what runs.
        engine_wait: told of it too.
        fusion_bytes: all-reductions are fused up to this size.
    """

    def __init__(
        self,
        queue: TensorQueue,
        process_sets: ProcessSetTable,
        request_table: RequestTable,
        cache: RequestCache,
        timeline: EngineTimeline,
        engine_wait: EngineWait,
        fusion_bytes: int,
    ) -> None:
        self._queue = queue
        self._process_sets = process_sets
        self._request_table = request_table
        self._cache = cache
        self._timeline = timeline
        self._engine_wait = engine_wait
        self.fusion_bytes = fusion_bytes
        self._devices: dict[str, torch.device] = {}

    def execute(self, decisions: Sequence[Decision]) -> None:
        """Run operations, fused where they can be; fail those that the ranks do not agree on."""
        self._timeline.decided()
        good = [decision for decision in decisions if decision.error is None]
        for decision in decisions:
            if decision.error is not None:
                self.reject(decision.request, decision.error)
        for batch in fuse(good, [decision.request.nbytes for decision in good], self.fusion_bytes):
            self._execute_batch(batch)
            for decision in batch:
                if not decision.absent:  # a rank that has joined would not know the name again
                    self._cache.use(decision.request)

    def reject(self, request: Request, text: str) -> None:
        """Fail an operation that will not run."""
        if (entry := self._queue.take(request)) is not None:
            entry.complete(error=HorovodInternalError(text))

    def execute_immediately(self, request: Request) -> None:
        """Do on all ranks what one of them has submitted."""
        error: MpisgdError | None = None
        world = self._process_sets.group(WORLD)
        assert world is not None
        try:
            IMMEDIATE[request.kind](request, world.queue.communicator)
        except MpisgdError as exc:  # raised on all ranks alike, and only one may wait
            error = exc
        if (entry := self._queue.take(request)) is not None:
            entry.complete(error=error)

    def _execute_batch(self, batch: Sequence[Decision]) -> None:
        requests = [decision.request for decision in batch]
        entries: list[Entry | None] = []
        try:
            entries += map(self._queue.take, requests)
            if requests[0].kind in ("add_process_set", "remove_process_set"):
                self._timeline.batch(batch, None)
                self._change_sets(requests[0], entries[0])
            else:
                group = self._process_sets.group(requests[0].set_id)
                batch_timeline = self._timeline.batch(batch, group)
                if group is not None:
                    self._perform(requests, entries, group, batch_timeline)
        except BaseException as exc:  # entries that were taken are not in the queue any more
            fail(filter(None, entries), exc)
            raise

    def _perform(
        self,
        requests: Sequence[Request],
        entries: Sequence[Entry | None],
        group: Group,
        timeline: BatchTimeline | None,
    ) -> None:
        """Perform one operation, with its wait and its timeline noted."""
        self._engine_wait.enter(f"{requests[0].kind} {requests[0].label!r}", group)
        with torch.no_grad(), tracing.purpose("carried"):
            if timeline is None:
                perform_operation(requests, entries, group, self._devices)
            else:
                own = [
                    {"bytes": entry.nbytes, **entry.contents} if entry else {"bytes": 0} for entry in entries
                ]
                perform_operation(requests, entries, group, self._devices, timeline.step)
                timeline.end(own)
        self._engine_wait.leave()

    def _change_sets(self, request: Request, entry: Entry | None) -> None:
        """Add or remove a process set, at the same place of the order on all ranks."""
        if request.kind == "add_process_set":
            set_id = self._process_sets.add(request.ranks)
            self._request_table.add_set(set_id, request.ranks)
        else:
            set_id = request.root
            self._request_table.remove_set(set_id)
            self._process_sets.remove(set_id)
            self.execute(self._request_table.decide())  # what is pending in it fails
        if entry is not None:
            entry.complete(set_id)
