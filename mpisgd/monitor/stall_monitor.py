"""`StallMonitor`: the thread of each process that answers what it does and checks its long waits."""

import time
from typing import TYPE_CHECKING

from mpisgd.monitor.deadlock_detector import DeadlockDetector
from mpisgd.monitor.rank_snapshot import MONITOR_THREAD
from mpisgd.monitor.rank_state import RankState, group_key
from mpisgd.monitor.state_collector import ANSWER_S, StateCollector
from mpisgd.monitor.watchdog import Watchdog
from mpisgd.threads import wait_registry
from mpisgd.threads.service_thread import ServiceThread

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["StallMonitor"]

CHECK_S = 1.0  # how often the thread checks this rank's waits


class StallMonitor:
    """The monitor of one rank. Without other ranks it has no thread.

    Args:
        collector: asks the other ranks, and answers them.
        watchdog: what is done about this rank's own long waits.
    """

    def __init__(self, collector: StateCollector, watchdog: Watchdog) -> None:
        self.collector = collector
        self.watchdog = watchdog
        self._detector = DeadlockDetector(self.collector)
        self._next_check_s = 0.0
        self._is_over = False
        self._thread: ServiceThread | None = None
        if len(collector.processes) > 1:
            self._thread = ServiceThread(MONITOR_THREAD, self._serve, what="the stall monitor")
            self._thread.start()
            wait_registry.on_timeout = self.watchdog.on_timeout

    def collect(self, *, deep: bool = False) -> list[RankState]:
        """Return what every rank of the job does, by rank; see `StateCollector.collect`."""
        return self.collector.collect(deep=deep)

    def late_in(self, group: "Group") -> list[int]:
        """Return the group ranks that have begun fewer operations of a group than this one; see `collect`."""
        key, number = group_key(group.ranks, group.ordinal), group.queue.consistency.number
        states = self.collect()
        return [i for i, rank in enumerate(group.ranks) if states[rank].num_begun.get(key, 0) < number]

    def _serve(self) -> bool:
        """One round of the thread, without which waits would neither be seen nor end."""
        asked = self.collector.shm.asked()
        if not self._is_over:
            self._run_once()
            self.collector.sleep_until_asked(asked)
        return not self._is_over

    def _run_once(self) -> None:
        self.collector.answer()
        self._detector.check()
        if time.monotonic() > self._next_check_s:
            self._next_check_s = time.monotonic() + CHECK_S
            self.watchdog.check()

    def close(self) -> None:
        """Answer no more. Not collective."""
        wait_registry.on_timeout = None
        self._is_over = True
        self.collector.close()
        if self._thread is not None:
            self._thread.join_from_others(ANSWER_S)

    def free(self) -> None:
        """Give the communicator back. Collective."""
        self.collector.free()
