"""`DeadlockDetector`: ends waits that can never end otherwise, on all ranks that have them, within seconds.

A rank that has waited for a while asks what all others do; of the ranks of a host the lowest that waits does.
When it finds ranks that can never go on, and the same ones unmoved a second later, it sends them a notice:
each ends its wait with a `Deadlock`. While all others are asked at different moments, nobody among those that
are stuck can have moved, since only they could move each other.
"""

import json
import time
from collections.abc import Sequence

from mpisgd.core import wait_registry
from mpisgd.errors import Deadlock
from mpisgd.monitor.deadlock_analysis import describe_deadlock, fingerprint, stuck_ranks
from mpisgd.monitor.rank_state import WAITS, RankState
from mpisgd.monitor.state_collector import StateCollector

__all__ = ["DeadlockDetector"]

FIRST_S = 2.0  # who has waited so long asks what the others do
SURE_S = 1.0  # between the two times
VALID_S = 10.0  # a notice about waits that have not been seen again by then is void
# Long waits are ordinary where one rank evaluates or saves: then it is asked less and less often.
BACKOFF = 1.5


class DeadlockDetector:
    """The deadlock detector of one rank; works on the monitor's thread, which calls it about once a second.

    Args:
        collector: asks the others.
    """

    def __init__(self, collector: StateCollector) -> None:
        self._collector = collector
        self._since_s = 0.0  # when the wait began that is being looked at
        self._next_s = FIRST_S
        self._notices: list[tuple[float, bytes]] = []  # with when they came
        self._suspects: dict[int, tuple[object, ...]] = {}

    def check(self) -> None:
        """See whether it is time to ask, and what others have found."""
        self._notices += [(time.monotonic(), text) for text in self._collector.notices()]
        self._carry_out_notices()
        longest = next(iter(wait_registry.registered()), None)
        if longest is None:
            return
        if longest.since_s != self._since_s:
            self._since_s, self._next_s, self._suspects = longest.since_s, FIRST_S, {}
        waited_s = time.monotonic() - longest.since_s
        if waited_s >= self._next_s and self._is_lowest():
            self._next_s = max(waited_s + SURE_S, waited_s * BACKOFF)
            self._analyse()

    def _is_lowest(self) -> bool:
        """Return whether no lower rank of this host waits, too."""
        lower = [state for state in self._collector.collect_host() if state.rank < self._collector.rank]
        return not any(state.state == WAITS for state in lower)

    def _analyse(self) -> None:
        states = self._collector.collect()
        stuck = stuck_ranks(states)
        suspects = {state.rank: fingerprint(state) for state in states if state.rank in stuck}
        before, self._suspects = self._suspects, suspects
        if not stuck:
            return
        if any(before.get(rank) != suspects[rank] for rank in stuck):
            self._next_s = time.monotonic() - self._since_s + SURE_S  # seen for the first time
            return
        self._notify(states, stuck)

    def _notify(self, states: Sequence[RankState], stuck: set[int]) -> None:
        serials = [(state.rank, _serials(state)) for state in states if state.rank in stuck]
        text = json.dumps([describe_deadlock(states, stuck), serials]).encode()
        self._collector.notify(text, stuck - {self._collector.rank})
        self._notices.append((time.monotonic(), text))
        self._carry_out_notices()

    def _carry_out_notices(self) -> None:
        """Carry out what can be now: a thread that waits may be awake for a moment."""
        since_s = time.monotonic() - VALID_S
        self._notices = [
            (came_s, text) for came_s, text in self._notices if came_s > since_s and not self._carry_out(text)
        ]

    def _carry_out(self, notice: bytes) -> bool:
        """End this rank's waits, if they are those that the notice is about; return whether that is done."""
        text, serials_by_rank = json.loads(notice)
        serials = set(dict(serials_by_rank).get(self._collector.rank, ()))
        # There may be others by now: who has had the notice before does something else already.
        registered = wait_registry.registered()
        calls = dict(wait_registry.mpi_calls).values()
        in_mpi = {wait_registry.serial_of(since_s) for _, since_s in calls}
        if not serials <= in_mpi | {wait.serial for wait in registered}:
            return False
        threads = {wait.thread for wait in registered if wait.serial in serials}
        for wait in registered:
            if wait.thread in threads:
                wait_registry.cancel(wait, Deadlock(text))
        return True


def _serials(state: RankState) -> list[int]:
    return sorted(wait.serial for wait in state.waits)
