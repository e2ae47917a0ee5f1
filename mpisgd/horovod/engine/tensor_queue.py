"""`TensorQueue`: the operations of a rank that are not done, and those not sent to the other ranks yet."""

import threading
import time
from collections import Counter
from typing import Any

from mpisgd import tracing
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.request_table import JOIN, WORLD
from mpisgd.horovod.engine.settings import Settings
from mpisgd.horovod.exceptions import HorovodInternalError
from mpisgd.threads import wait_registry

__all__ = ["LEAVE", "TensorQueue"]

DUPLICATE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
    "currently being processed.  If you want to request another tensor, use a different tensor name."
)
MIN_SLEEP_S = 0.001
LEAVE = Request("leave", "leave")  # tells the others that this rank will submit nothing any more


class TensorQueue:
    """Any thread of the rank submits operations; the one that runs a cycle takes out the new ones.

    Args:
        settings: when to send new operations.

    Attributes:
        broken: why nothing can be submitted any more, None as long as it can.
        num_waiting: how many threads wait for results. New operations are sent at once then.
    """

    def __init__(self, settings: Settings) -> None:
        self.broken: BaseException | None = None
        self.num_waiting = 0
        self._settings = settings
        self._lock = threading.Lock()
        self._entries: dict[tuple[int, str], Entry] = {}
        self._num_unnamed: Counter[int] = Counter()
        self._new: list[Request] = []
        self._new_nbytes = 0
        self._new_since = 0.0
        self._added_at = 0.0
        self._wakes_at = 0.0  # when the progress thread wakes by itself; 0: it is awake
        self._leaving = False

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
            if self.broken is not None:
                raise HorovodInternalError(f"Horovod has been shut down: {self.broken}") from self.broken
            if self._leaving and not by_engine:
                raise HorovodInternalError("Horovod has been shut down by this rank")
            request = entry.request
            if not request.name:
                self._num_unnamed[request.set_id] += 1
                name = f"{request.kind}.noname.{self._num_unnamed[request.set_id]}"
                entry.request = request = request._replace(name=name)
            wait_registry.mark_communicating()
            if request.key in self._entries:
                joined = "join: another thread of this rank has joined already"
                raise ValueError(joined if request == JOIN else f"{request.label!r}: {DUPLICATE}")
            self._entries[request.key] = entry
            entry.submitted_ns = None if tracing.sink is None else time.monotonic_ns()
            now_s = self._added_at = time.monotonic()
            if not self._new:
                self._new_since = now_s
            self._new.append(request)
            self._new_nbytes += entry.nbytes
            return self._wakes_at > now_s + self._settings.cycle_s or self._is_due(now_s)

    def leave(self) -> None:
        """Submit nothing any more, and let the others know."""
        with self._lock:
            self._leaving = True
            self._new.append(LEAVE)

    # -- when to send ----------------------------------------------------------------------------------

    def count_waiting(self, change: int) -> int:
        """Count a thread that begins or ends to wait, and return how many do."""
        with self._lock:
            self.num_waiting += change
            return self.num_waiting

    def is_due(self) -> bool:
        """Return whether what this rank has to send should wait no longer."""
        with self._lock:
            return self._is_due(time.monotonic())

    def _is_due(self, now_s: float) -> bool:
        if not self._new:
            return False
        wanted = self.num_waiting > 0 or self._leaving
        full = self._new_nbytes >= self._settings.fusion_bytes
        return wanted or full or now_s - self._new_since >= self._settings.cycle_s

    def has_unsent(self) -> bool:
        """Return whether there is anything that was not sent yet."""
        return bool(self._new)

    def begin_sleep(self, longest_s: float) -> float:
        """Return how long the progress thread may sleep: longer and longer as nothing is submitted.

        While operations come one after the other it polls, which costs less than to be woken for each; most
        of them are waited for, and then it has nothing to do.
        """
        with self._lock:
            now_s = time.monotonic()
            if self._new and not self.num_waiting:
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

    def take_new(self) -> list[Request]:
        """Return the requests that were not sent yet, and count them as sent."""
        with self._lock:
            requests, self._new, self._new_nbytes = self._new, [], 0
            return requests

    def take(self, key: tuple[int, str]) -> Entry | None:
        """Remove and return the entry of an operation that runs now, or never; None if this rank has none."""
        with self._lock:
            return self._entries.pop(key, None)

    def complete(self, key: tuple[int, str], result: Any = None, error: BaseException | None = None) -> None:
        """Set the outcome of an operation, if this rank has a part in it."""
        if (entry := self.take(key)) is not None:
            entry.complete(result, error)

    def end_join(self, last: int | None = None, error: BaseException | None = None) -> None:
        """Complete the join. Unnamed operations are numbered anew, since ranks with more data are ahead."""
        with self._lock:
            self._num_unnamed[WORLD] = 0
        self.complete(JOIN.key, last, error)

    def close(self, why: BaseException) -> list[Entry]:
        """Accept nothing any more; return the entries that are left."""
        with self._lock:
            self.broken = why
            left = list(self._entries.values())
            self._entries.clear()
            return left

    def pending(self) -> list[Request]:
        """Return the requests that were submitted and are not done."""
        with self._lock:
            return [entry.request for entry in self._entries.values()]
