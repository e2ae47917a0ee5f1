"""`TensorQueue`: the operations of a rank that are not done, and those not sent to the other ranks yet."""

import threading
import time
from collections import Counter

from mpisgd.core import wait_registry
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.exchange import CycleMessage
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.request_table import JOIN, WORLD
from mpisgd.horovod.engine.settings import Settings
from mpisgd.horovod.engine.timeline import EngineTimeline
from mpisgd.horovod.exceptions import HorovodInternalError

__all__ = ["TensorQueue"]

DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
    "currently being processed.  If you want to request another tensor, use a different tensor name."
)
MIN_SLEEP_S = 0.001


class TensorQueue:
    """Any thread of the rank submits operations; the one that runs a cycle takes out the new ones.

    Args:
        settings: when to send new operations.
        timeline: told of each operation.

    Attributes:
        broken: why nothing can be submitted any more, None as long as it can.
    """

    def __init__(self, settings: Settings, timeline: EngineTimeline) -> None:
        self.broken: BaseException | None = None
        self._settings = settings
        self._timeline = timeline
        self._lock = threading.Lock()
        self._entries: dict[tuple[int, str], Entry] = {}
        self._num_unnamed: Counter[int] = Counter()
        self._new: list[Request] = []
        self._new_nbytes = 0
        self._new_since = 0.0
        self._added_at = 0.0
        self._wakes_at = 0.0  # when the progress thread wakes by itself; 0: it is awake
        self._num_waiting = 0
        self._join: Entry | None = None
        self._join_sent = False
        self._leaving = self._leaving_sent = False

    # -- submitting -----------------------------------------------------------------------------------

    def add(self, entry: Entry, *, by_engine: bool = False) -> bool:
        """Add an operation; return whether the progress thread must be woken for it.

        One without a name is known by its number among those of its process set; what is refused, or belongs
        to another set, does not count. So ranks agree on it as long as they submit such in the same order.

        Args:
            entry: the operation.
            by_engine: whether it is one of the engine's own, which it may submit after the program's last.

        Raises:
            ValueError: one of this name is pending.
            HorovodInternalError: nothing can be submitted any more.
        """
        with self._lock:
            self._refuse_if_over(leaving_too=not by_engine)
            if not entry.request.name:
                entry.request = self._numbered(entry.request)
            key = entry.request.key
            wait_registry.mark_communicating()
            if key in self._entries:
                raise ValueError(f"{entry.request.label!r}: {DUPLICATE}")
            self._entries[key] = entry
            now_s = time.monotonic()
            if not self._new:
                self._new_since = now_s
            self._new.append(entry.request)
            self._timeline.submitted(entry.request)
            self._new_nbytes += entry.nbytes
            self._added_at = now_s
            return self._wakes_at > now_s + self._settings.cycle_s or self._is_due(now_s)

    def _numbered(self, request: Request) -> Request:
        self._num_unnamed[request.set_id] += 1
        return request._replace(name=f"{request.kind}.noname.{self._num_unnamed[request.set_id]}")

    def join(self) -> Entry:
        """Join; the result of the entry is the rank that joined last."""
        with self._lock:
            self._refuse_if_over()
            if self._join is not None:
                raise ValueError("join: another thread of this rank has joined already")
            wait_registry.mark_communicating()
            self._join = Entry(JOIN)
            return self._join

    def leave(self) -> None:
        """Submit nothing any more, and let the others know."""
        with self._lock:
            self._leaving = True

    def _refuse_if_over(self, *, leaving_too: bool = True) -> None:
        if self.broken is not None:
            raise HorovodInternalError(f"Horovod has been shut down: {self.broken}") from self.broken
        if self._leaving and leaving_too:
            raise HorovodInternalError("Horovod has been shut down by this rank")

    # -- when to send ----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """How many threads wait for results. New operations are sent at once then."""
        return self._num_waiting

    def count_waiting(self, change: int) -> int:
        """Count a thread that begins or ends to wait, and return how many do."""
        with self._lock:
            self._num_waiting += change
            return self._num_waiting

    def is_due(self) -> bool:
        """Return whether what this rank has to send should wait no longer."""
        with self._lock:
            return self._is_due(time.monotonic())

    def has_unsent(self) -> bool:
        """Return whether there is anything that was not sent yet."""
        with self._lock:
            return bool(self._new) or self._has_unsent_flags()

    def _has_unsent_flags(self) -> bool:
        joins = self._join is not None and not self._join_sent
        return joins or (self._leaving and not self._leaving_sent)

    def _is_due(self, now_s: float) -> bool:
        if self._has_unsent_flags():
            return True
        if not self._new:
            return False
        full = self._new_nbytes >= self._settings.fusion_bytes
        return full or self._num_waiting > 0 or now_s - self._new_since >= self._settings.cycle_s

    def begin_sleep(self, longest_s: float) -> float:
        """Return how long the progress thread may sleep: longer and longer as nothing is submitted.

        While operations come one after the other it polls, which costs less than to be woken for each; most
        of them are waited for, and then it has nothing to do.
        """
        with self._lock:
            now_s = time.monotonic()
            if self._new and not self._num_waiting:
                sleep_s = max(0.0, self._new_since + self._settings.cycle_s - now_s)
            else:
                shortest_s = max(self._settings.cycle_s, MIN_SLEEP_S)
                sleep_s = min(max(shortest_s, now_s - self._added_at), longest_s)
            self._wakes_at = now_s + sleep_s
            return sleep_s

    def end_sleep(self) -> None:
        """Note that the progress thread is awake."""
        self._wakes_at = 0.0

    # -- in a cycle ------------------------------------------------------------------------------------

    def take_message(self, *, wants_stacks: bool) -> CycleMessage:
        """Return what was not sent yet.

        Args:
            wants_stacks: whether this rank asks for everyone's Python stack.
        """
        with self._lock:
            requests, self._new, self._new_nbytes = self._new, [], 0
            joins = self._join is not None and not self._join_sent
            leaves = self._leaving and not self._leaving_sent
            self._join_sent = self._join_sent or joins
            self._leaving_sent = self._leaving_sent or leaves
        return CycleMessage(requests, joins, leaves, wants_stacks)

    def take(self, request: Request) -> Entry | None:
        """Remove and return the entry of an operation that runs now; None if this rank has none."""
        with self._lock:
            return self._entries.pop(request.key, None)

    def withdraw(self, key: tuple[int, str]) -> Entry | None:
        """Remove and return the entry of an operation that this rank has withdrawn; None if it has none."""
        with self._lock:
            if key != JOIN.key:
                return self._entries.pop(key, None)
            entry, self._join, self._join_sent = self._join, None, False
            return entry

    def end_join(self, last: int | None = None, error: BaseException | None = None) -> None:
        """Complete the join. Unnamed operations are numbered anew, since ranks with more data are ahead."""
        with self._lock:
            entry, self._join, self._join_sent = self._join, None, False
            self._num_unnamed[WORLD] = 0
        if entry is not None:
            entry.complete(last, error)

    def close(self, why: BaseException) -> list[Entry]:
        """Accept nothing any more; return the entries that are left."""
        with self._lock:
            self.broken = why
            left = [*self._entries.values(), *filter(None, [self._join])]
            self._entries.clear()
        return left

    def pending(self) -> list[Request]:
        """Return what was submitted and is not done."""
        with self._lock:
            return [entry.request for entry in self._entries.values()]
