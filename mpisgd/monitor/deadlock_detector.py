"""`DeadlockDetector`: ends waits that can never end otherwise, on all ranks that have them, within seconds.

A rank that has waited for a while asks what all others do; of the ranks of a host the lowest that waits does.
When it finds ranks that can never go on, and the same ones unmoved a second later, it sends them the verdict:
each ends its wait with a `Deadlock`. While all others are asked at different moments, nobody among those that
are stuck can have moved, since only they could move each other.
"""

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpisgd.core import wait_registry
from mpisgd.errors import Deadlock
from mpisgd.monitor.deadlock_analysis import describe_stuck, state_of, stuck_ranks
from mpisgd.monitor.rank_state import WAITS, RankState

if TYPE_CHECKING:
    from mpisgd.monitor.stall_monitor import StallMonitor

__all__ = ["DeadlockDetector"]

FIRST_S = 2.0  # who has waited so long asks what the others do
SURE_S = 1.0  # between the two times
VALID_S = 10.0  # a verdict about waits that have not been seen again by then is void
# Long waits are ordinary where one rank evaluates or saves: then it is asked less and less often.
MORE = 1.5


class DeadlockDetector:
    """The judge of one rank; works on the watch's thread, which comes by about once a second.

    Args:
        watch: asks the others.
    """

    def __init__(self, watch: "StallMonitor") -> None:
        self._watch = watch
        self._since_s = 0.0  # when the wait began that is being looked at
        self._next_s = FIRST_S
        self._verdicts: list[tuple[float, bytes]] = []  # with when they were heard
        self._suspects: dict[int, tuple[object, ...]] = {}

    def come_by(self) -> None:
        """See whether it is time to ask, and what has been said by others."""
        self._verdicts += [(time.monotonic(), text) for text in self._watch.take_verdicts()]
        self._carry_out_verdicts()
        longest = next(iter(wait_registry.noted()), None)
        if longest is None:
            return
        if longest.since_s != self._since_s:
            self._since_s, self._next_s, self._suspects = longest.since_s, FIRST_S, {}
        waited_s = time.monotonic() - longest.since_s
        if waited_s >= self._next_s and self._is_lowest():
            self._next_s = max(waited_s + SURE_S, waited_s * MORE)
            self._judge()

    def _is_lowest(self) -> bool:
        """Return whether no lower rank of this host waits, too."""
        lower = [view for view in self._watch.ask_host() if view.rank < self._watch.rank]
        return not any(view.state == WAITS for view in lower)

    def _judge(self) -> None:
        views = self._watch.ask()
        stuck = stuck_ranks(views)
        states = {view.rank: state_of(view) for view in views if view.rank in stuck}
        before, self._suspects = self._suspects, states
        if not stuck:
            return
        if any(before.get(rank) != states[rank] for rank in stuck):
            self._next_s = time.monotonic() - self._since_s + SURE_S  # seen for the first time
            return
        self._pronounce(views, stuck)

    def _pronounce(self, views: Sequence[RankState], stuck: set[int]) -> None:
        meant = [(view.rank, _serials(view)) for view in views if view.rank in stuck]
        text = json.dumps([describe_stuck(views, stuck), meant]).encode()
        self._watch.give_verdict(text, stuck - {self._watch.rank})
        self._verdicts.append((time.monotonic(), text))
        self._carry_out_verdicts()

    def _carry_out_verdicts(self) -> None:
        """Carry out what can be now: a thread that waits may be awake for a moment."""
        since_s = time.monotonic() - VALID_S
        self._verdicts = [
            (heard_s, text)
            for heard_s, text in self._verdicts
            if heard_s > since_s and not self._carry_out(text)
        ]

    def _carry_out(self, verdict: bytes) -> bool:
        """End this rank's waits, if they are those that the verdict is about; return whether that is done."""
        text, everyones = json.loads(verdict)
        meant = set(dict(everyones).get(self._watch.rank, ()))
        # There may be others by now: who has heard of the verdict before does something else already.
        noted = wait_registry.noted()
        inside = {wait_registry.serial_of(since_s) for _, since_s in wait_registry.inside_mpi().values()}
        if not meant <= inside | {waiter.serial for waiter in noted}:
            return False
        threads = {waiter.thread for waiter in noted if waiter.serial in meant}
        for waiter in noted:
            if waiter.thread in threads:
                wait_registry.cancel_wait(waiter, Deadlock(text))
        return True


def _serials(view: RankState) -> list[int]:
    return sorted(wait.serial for wait in view.waits)
