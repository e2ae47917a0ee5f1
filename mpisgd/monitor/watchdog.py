"""What a rank does about its own long waits: a warning, in the end an error or the end of the job.

A wait of ours ends at its timeout by itself and asks here what to say (`on_timeout`). A call that is blocked
inside MPI cannot do that: the monitor's thread sees it and reports what everyone does. Where MPI can revoke
communicators that ends the call, and with it all waits of the job. Else, or where it does not, the job ends.
So it does where a rank was lost and a one-sided call goes on: nothing is revoked of a window (Open MPI 5.0).

A rank whose launcher was killed would compute and wait for ever: MPI notices it in its own calls alone.

One rank reports a stall, not all of them. The ranks of a host take turns by the console's lock, and note in
their mailbox what they have reported. Between hosts the lowest one reports: who has asked all others knows
which of them are about to do so too.
"""

import contextlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpisgd.monitor.console import ConsoleLock
from mpisgd.monitor.deadlock_detector import DeadlockDetector
from mpisgd.monitor.hang_report import activity, for_whom, hang_report, main_wait, missing, place
from mpisgd.monitor.rank_snapshot import MONITOR_THREAD
from mpisgd.monitor.rank_state import WAITS, RankState, Wait, group_key
from mpisgd.monitor.state_collector import ANSWER_S, StateCollector
from mpisgd.standard_error import print_to_user
from mpisgd.threads import wait_registry, waiting
from mpisgd.threads.service_thread import ServiceThread

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["StallMonitor", "Watchdog"]

CHECK_S = 1.0  # how often the thread checks this rank's waits
WARNING, TIMEOUT = "warning", "timeout"
SHORT_S = 1.0  # waits up to this are not examined
ONE_SIDED = "Win_"  # how the calls begin that wait for a window
RETURN_S = 10.0  # the freed calls have returned by then (2 to 5 s were seen)
REPORT_S = 1.0  # after another rank has reported, this one lets it finish
TURN_S = 8.0  # who has the lock asks all others first, which takes that long at most
SLACK_S = 1.5  # the ranks' waits began about so far apart


def _stall_key(level: str, wait: Wait, rank: int) -> int:
    """Return a number for one stall, the same on all ranks that wait in it; messages are each rank's own."""
    what: tuple[object, ...] = (rank, wait.serial)
    if wait.number:
        what = wait.number, group_key(wait.members, wait.ordinal)
    elif wait.members:
        what = wait.what, wait.members
    return zlib.crc32(f"{level} {what}".encode()) or 1


class Watchdog:
    """The long waits of one rank.

    Args:
        collector: tells what this rank and the others do.
        console: held while this rank reports.
        timeout_s: how long a call may be blocked inside MPI, where its operation has no timeout of its own.
        abort: ends the job, or what stands for that, where a rank is blocked inside MPI; gets the reason.
        end_rank: ends this process alone; gets the reason.
        revoke: ends all calls that are blocked inside MPI, with an error that says the reason; None where
            that is not to be had.

    Attributes:
        warning_s: after how long the user is warned; 0: never.
        abort_s: after how long the job ends, whatever the wait's own timeout; 0: by that alone.
    """

    def __init__(
        self,
        collector: StateCollector,
        console: ConsoleLock,
        *,
        timeout_s: float,
        warning_s: float,
        abort: Callable[[str], None],
        end_rank: Callable[[str], None],
        revoke: Callable[[str], None] | None,
    ) -> None:
        self.warning_s = warning_s
        self.abort_s = 0.0
        self._abort = abort
        self._end_rank = end_rank
        self._revoke = revoke
        self._revoked_s = 0.0  # when that was done
        self._lost_s = 0.0  # when a rank was seen to be lost
        self._collector = collector
        self._console = console
        self._timeout_s = timeout_s
        self._warned: set[int] = set()
        self._launcher = os.getppid()

    def check(self) -> None:
        """Check whether something waits too long; called again and again by the monitor's thread."""
        if os.getppid() != self._launcher:
            self._end_without_launcher()
        self._lost_s = (self._lost_s or time.monotonic()) if waiting.cancelled_by_loss() else 0.0
        if self._oldest_s() < SHORT_S:
            self._warned.clear()
            return
        for wait in self._collector.snapshot(stacks=False).waits:
            if wait.timeout_s is None and not wait.mpi_call:  # another wait's timeout ends it
                continue
            timeout_s = wait.timeout_s or self._timeout_s
            if 0 < self.abort_s < wait.waited_s:
                self._end(wait, self.abort_s, f"longer than {self.abort_s:g} s, after which the job ends")
            elif self._outlasts_loss(wait):
                reason = "a rank of the job was lost, and this MPI does not end a one-sided call for that"
                self._end(wait, RETURN_S, f"{reason}, so the job ends")
            elif wait.mpi_call and wait.waited_s > timeout_s:
                self._end_blocked(wait, timeout_s)
            elif 0 < self.warning_s < wait.waited_s:
                self._warn(wait, timeout_s)

    def _end_without_launcher(self) -> None:
        """End this process; those of the others end likewise: MPI reached them by way of the launcher."""
        with contextlib.suppress(OSError):  # whoever has read what was printed is gone, too
            print_to_user(
                f"rank {self._collector.rank}: the process that started it ({self._launcher}; mpirun, or its "
                "daemon on this host) has ended, so the job ends"
            )
        self._end_rank("its launcher has ended")

    def _oldest_s(self) -> float:
        """Return for how long the oldest wait of this rank has lasted; cheap."""
        since_s = [since_s for _, since_s in dict(wait_registry.mpi_calls).values()]
        since_s += [wait.since_s for wait in wait_registry.registered()]
        return time.monotonic() - min(since_s) if since_s else 0.0

    def _outlasts_loss(self, wait: Wait) -> bool:
        """Return whether a one-sided call goes on although a rank was lost."""
        if not self._lost_s or not wait.mpi_call.startswith(ONE_SIDED):
            return False
        return min(wait.waited_s, time.monotonic() - self._lost_s) > RETURN_S

    def _warn(self, wait: Wait, timeout_s: float) -> None:
        key = _stall_key(WARNING, wait, self._collector.rank)
        if key not in self._warned:
            self._warned.add(key)
            more = (
                f". It goes on waiting for {timeout_s:g} s in all "
                "(MPISGD_TIMEOUT_S; MPISGD_STALL_WARNING_S sets when this is said)"
            )
            self._report(WARNING, wait, self.warning_s, more)

    def _end_blocked(self, wait: Wait, timeout_s: float) -> None:
        """End a call that is blocked inside MPI, or the job."""
        longer = f"longer than its limit of {timeout_s:g} s (MPISGD_TIMEOUT_S). It is blocked in there"
        if self._revoke is None:
            self._end(wait, timeout_s, f"{longer}, where no error can be raised, so the job ends")
        elif not self._revoked_s:
            states = self._report_end(wait, timeout_s, f"{longer}: all communicators of the job are revoked")
            self._revoke(f"{self._who(wait, states)}: {longer}; no group can be used any more")
            self._revoked_s = time.monotonic()
        elif time.monotonic() > self._revoked_s + RETURN_S:
            self._abort(f"{longer}, and is so {RETURN_S:g} s after it was revoked")

    def _end(self, wait: Wait, timeout_s: float, reason: str) -> None:
        """End the job, after one rank has reported why."""
        self._report_end(wait, timeout_s, reason)
        self._abort(reason)

    def _report_end(self, wait: Wait, timeout_s: float, reason: str) -> Sequence[RankState]:
        """Report why a wait ends, or let another rank report it; return what everyone does."""
        states = self._report(TIMEOUT, wait, timeout_s, f": {reason}")
        if not states:
            time.sleep(REPORT_S)
        return states

    def on_timeout(self) -> str:
        """Report what everyone does, as this thread's wait has timed out; return who is missing, in one line.

        Called while the wait is still registered, so that others, too, see that this rank waits.
        """
        waits = self._collector.snapshot(stacks=False).waits
        mine = [wait for wait in waits if wait.thread == threading.current_thread().name]
        if not mine:
            return ""
        states = self._report(TIMEOUT, mine[-1], mine[-1].timeout_s or 0.0, ". That is the limit")
        late = missing(mine[-1], states) if states else []
        texts = [
            ", ".join([f"rank {rank}: {activity(states[rank], states)}", *states[rank].failed_threads])
            for rank in late
            if rank != self._collector.rank
        ]
        return "; ".join(texts[:4])

    # -- reports -------------------------------------------------------------------------------------

    def _who(self, wait: Wait, states: Sequence[RankState]) -> str:
        """Say who has waited, how long, for whom and where."""
        rank = self._collector.rank
        return f"rank {rank} has waited {wait.waited_s:.1f} s{for_whom(wait, rank, states)} in {place(wait)}"

    def _report(self, level: str, wait: Wait, after_s: float, more: str) -> Sequence[RankState]:
        """Report what everyone does, unless another rank has, or is about to.

        Args:
            level: each stall is reported once at each level.
            wait: this rank's own.
            after_s: the other ranks that wait report it when they have waited for so long.
            more: what the report says of the wait.

        Returns:
            What everyone does; nothing where another rank has reported it already.
        """
        key, shm = _stall_key(level, wait, self._collector.rank), self._collector.shm
        with self._console.turn(TURN_S, self._collector.sleep):
            if shm.is_reported(key):
                return ()
            states = self._collector.collect(deep=True)
            reported = any(key in state.reported for state in states)
            if not reported and not self._will_be_reported(level, key, after_s, states):
                mark = "warning: " if level == WARNING else ""
                headline = f"{mark}{self._who(wait, states)}{more}. What the ranks do:"
                print_to_user(f"{headline}\n{hang_report(states)}")
                waits = [(state.rank, main_wait(state)) for state in states]
                for other in {key, *(_stall_key(level, each, rank) for rank, each in waits if each)}:
                    shm.note_reported(other)
            return states

    def _will_be_reported(self, level: str, key: int, after_s: float, states: Sequence[RankState]) -> bool:
        """Return whether a rank of a lower host has waited as long in the same stall."""
        domains, first = self._collector.domains, self._collector.domain[0]
        lower = [states[rank] for domain in domains if domain[0] < first for rank in domain]
        return any(
            (wait := main_wait(state)) is not None
            and _stall_key(level, wait, state.rank) == key
            and wait.waited_s > after_s - SLACK_S
            for state in lower
            if state.state == WAITS
        )


class StallMonitor:
    """Has the thread that answers what this rank does and checks its long waits; none without other ranks.

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
        """Return the state of every rank of the job, by rank; see `StateCollector.collect`."""
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
