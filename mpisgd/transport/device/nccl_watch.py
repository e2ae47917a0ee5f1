"""`NcclWatch`: sees to it that a rank that does not come is an error here, and not a GPU that waits for ever.

A host that waits for the GPU, in `item()` or `synchronize()`, waits in C++ and knows of no other rank. And
what NCCL waits for keeps the GPU: only the end of NCCL's communicator frees it. So a thread of each rank
looks at what NCCL has in flight, and ends it where

    a rank was lost          all waits of this rank were cancelled (monitor/failure_detector.py)
    it takes too long        longer than the timeout of the group; the monitor tells for whom
    NCCL reports an error    such as a connection that has broken; the loss of a rank may explain that

What was in flight is undefined then. The host goes on from where it waited, and its next operation of the
group raises the error.
"""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpisgd.accelerator.runtime import runtime
from mpisgd.call_site import call_site
from mpisgd.core.consistency import Operation
from mpisgd.errors import CollectiveTimeout, MpisgdError, NcclFailed, afresh
from mpisgd.interfaces.job import Job
from mpisgd.threads import scheduling, wait_registry, waiting
from mpisgd.threads.service_thread import ServiceThread
from mpisgd.threads.wait_registry import WaitReason

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["InFlight", "Launched", "watch"]

POLL_S = 0.1  # as often as torch's own watchdog looks
REGISTER_S = 1.0  # what takes longer is told to the monitor
EXPLAIN_S = 1.0  # the failure detector finds out by then why NCCL has failed


class Launched:
    """One operation that the GPU may not have done yet.

    Args:
        operation: the operation.
        number: of it in its group.
        works: torch's.
    """

    def __init__(self, operation: Operation, number: int, works: Sequence[Any]) -> None:
        self.operation = operation
        self.number = number
        self.site = call_site()
        self.since_s = scheduling.now_s()
        self._works = works
        self._event: Any = None

    def wait_for(self, event: Any) -> None:
        """Look at an event that comes after the operation from now on: torch's works keep its tensors."""
        self._event, self._works = event, ()

    def is_done(self) -> bool:
        """Return whether the GPU has done it."""
        works, event = self._works, self._event  # in this order: another thread exchanges them
        return bool(event.query()) if event is not None else all(work.is_completed() for work in works)


class InFlight:
    """What one communicator of NCCL has in flight, in the order in which the GPU does it.

    Args:
        group: of the communicator.
        inner: torch's process group.
        partner: the global rank at the other end of messages; None: collectives of the group.
    """

    def __init__(self, group: "Group", inner: Any, partner: int | None = None) -> None:
        self.group = group
        self.partner = partner
        self.queue = group.queue
        self._inner = inner
        self._launched: collections.deque[Launched] = collections.deque()
        self._first_since_s = 0.0  # when what is the first now began to be
        self._failed_s = 0.0  # when NCCL's error was seen
        self._lock = threading.Lock()  # of who takes from what was launched
        self.error: MpisgdError | None = None

    def add(self, operation: Operation, works: Sequence[Any]) -> Launched:
        """Note an operation that was launched just now."""
        launched = Launched(operation, self.queue.consistency.number, works)
        self._launched.append(launched)
        return launched

    def first(self) -> Launched | None:
        """Return the oldest operation that the GPU has not finished, if there is one. From any thread."""
        with self._lock:
            while self._launched and self._launched[0].is_done():
                self._launched.popleft()
                self._first_since_s = scheduling.now_s()
            return self._launched[0] if self._launched else None

    def since_s(self, first: Launched) -> float:
        """Return since when that has been the first."""
        return max(first.since_s, self._first_since_s)

    def waited_s(self, first: Launched) -> float:
        """Return for how long that has been the first."""
        return scheduling.now_s() - self.since_s(first)

    def end(self, error: MpisgdError) -> None:
        """End the communicator; the first error stays. What is in flight is over, and undefined."""
        if self.error is None:
            self.error = error
            self._inner.abort()

    def or_its_error(self, error: MpisgdError) -> MpisgdError:
        """Return why the communicator was ended, or an error that has come up where it was not."""
        return error if self.error is None else afresh(self.error)

    def failure(self) -> MpisgdError | None:
        """Return NCCL's own error, once nothing else may explain it any more."""
        code = self._inner.get_error() if hasattr(self._inner, "get_error") else None  # torch 2.4 has none
        if code is None or code.name == "SUCCESS":
            return None
        self._failed_s = self._failed_s or scheduling.now_s()
        if scheduling.now_s() < self._failed_s + EXPLAIN_S:
            return None
        return NcclFailed(
            f"group '{self.group.name}': NCCL reports {code.name} (a connection to another rank has broken, "
            "or a driver has failed); NCCL_DEBUG=WARN shows more"
        )

    def reason(self, first: Launched) -> WaitReason:
        """Tell the monitor what it waits for."""
        group = self.group
        what = f"{first.operation} (NCCL)"
        if self.partner is not None:
            return WaitReason(what, group.name, (self.partner,))
        return WaitReason(what, group.name, (), group.ranks, first.number, group.ordinal)

    def timeout_error(self, first: Launched, seen: str) -> MpisgdError:
        """Return the error of an operation that takes too long; `seen`: for whom it waits."""
        group, more = self.group, f" ({seen})" if seen else ""
        number = f", operation {first.number}" if self.partner is None else ""
        awaited = "other ranks" if self.partner is None else f"rank {self.partner}"
        return CollectiveTimeout(
            f"{first.operation} at {first.site()}: the GPU of rank {group.ranks[group.rank]} (group "
            f"'{group.name}'{number}) has waited {self.waited_s(first):.1f} s for {awaited}{more}, "
            "and NCCL was ended here. Raise MPISGD_TIMEOUT_S or the group's own timeout if ranks may be "
            "that far apart"
        )


_of_jobs: "dict[Job, NcclWatch]" = {}  # one, but where ranks are threads
_lock = threading.Lock()


def watch(in_flight: InFlight, *, end: bool = False) -> None:
    """Watch a communicator from now on, or `end` that."""
    job = in_flight.group.job
    with _lock:
        own = _of_jobs.get(job)
        if end and own is not None and in_flight in own.open:
            own.open.remove(in_flight)
        elif not end and own is not None:
            own.open.append(in_flight)
        elif not end:
            _of_jobs[job] = NcclWatch(job, in_flight)
            _of_jobs[job].start()


class NcclWatch(ServiceThread):
    """The thread; ends when there is nothing to watch.

    Args:
        job: whose communicators it watches.
        first: of these.

    Attributes:
        open: all of them; guarded by the lock of this module.
    """

    def __init__(self, job: Job, first: InFlight) -> None:
        super().__init__("mpisgd NCCL watch", self._look)
        self.open = [first]
        self._job = job
        self._never = threading.Event()  # a thread that waits for one is known not to communicate
        self._registered: tuple[InFlight, float] | None = None

    def run(self) -> None:
        """See `ServiceThread`."""
        runtime().allow_captures_elsewhere()
        super().run()

    def _look(self) -> bool:
        """One round."""
        scheduling.wait_for_event(self._never, POLL_S)
        with _lock:
            everything = list(self.open)
            if not everything:
                del _of_jobs[self._job]
                self._register(None, 0.0)
                return False
        lost = waiting.cancel_reason()
        oldest: tuple[float, InFlight, Launched] | None = None
        for each in everything:
            if (failure := lost or each.failure()) is not None:
                _give_up(each, failure)
            elif (first := _first_of(each)) is not None:
                waited_s = each.waited_s(first)
                if oldest is None or waited_s > oldest[0]:
                    oldest = waited_s, each, first
        self._check(oldest)
        return True

    def _check(self, oldest: tuple[float, InFlight, Launched] | None) -> None:
        """End what has lasted too long; of what lasts long, let the monitor know."""
        if oldest is None or oldest[0] < min(REGISTER_S, _limit_s(oldest[1])):
            self._register(None, 0.0)
            return
        waited_s, each, first = oldest
        since_s = each.since_s(first)
        self._register((each, since_s), _limit_s(each), lambda: each.reason(first))
        if (error := wait_registry.cancel_error(since_s)) is not None:
            assert isinstance(error, MpisgdError)
            _give_up(each, error)
        elif waited_s > _limit_s(each):
            _give_up(each, each.timeout_error(first, wait_registry.report_timeout()))

    def _register(
        self,
        wait: tuple[InFlight, float] | None,
        limit_s: float,
        reason: Callable[[], WaitReason] | None = None,
    ) -> None:
        if wait == self._registered:
            return
        wait_registry.unregister(self)
        self._registered = wait
        if wait is not None:
            wait_registry.register(self, wait[1], limit_s, reason)


def _first_of(each: InFlight) -> Launched | None:
    """Return the oldest operation that the GPU has not finished, None where it cannot be asked any more."""
    try:
        return each.first()
    except RuntimeError as exc:  # of CUDA
        _give_up(each, NcclFailed(f"group '{each.group.name}': {exc}"))
        return None


def _limit_s(each: InFlight) -> float:
    return each.queue.consistency.timeout_s


def _give_up(each: InFlight, error: MpisgdError) -> None:
    """Let the group fail with an error, and the GPU go on."""
    watch(each, end=True)
    each.end(error)
    each.queue.abort(error)
