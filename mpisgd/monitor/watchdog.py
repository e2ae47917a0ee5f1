"""What a rank does about its own long waits: a warning, in the end an error or the end of the job.

A wait of ours ends at its timeout by itself and asks here what to say (`on_timeout`). A call that is blocked
inside MPI cannot do that: the monitor's thread sees it and reports what everyone does. Where MPI can revoke
communicators that ends the call, and with it all waits of the job. Else, or where it does not, the job ends.
"""

import threading
import time
from collections.abc import Callable, Sequence

from mpisgd.arguments import ranks_text
from mpisgd.core import wait_registry
from mpisgd.monitor.hang_report import activity, missing, place
from mpisgd.monitor.rank_state import RankState, Wait
from mpisgd.monitor.reporter import Reporter, stall_key
from mpisgd.monitor.state_collector import StateCollector

__all__ = ["Watchdog"]

WARNING, TIMEOUT = "warning", "timeout"
SHORT_S = 1.0  # waits up to this are not examined
RETURN_S = 10.0  # the freed calls have returned by then (2 to 5 s were seen)
REPORT_S = 1.0  # after another rank has reported, this one lets it finish


class Watchdog:
    """The long waits of one rank.

    Args:
        collector: tells what this rank and the others do.
        reporter: reports it.
        timeout_s: how long a call may be blocked inside MPI, where its operation has no timeout of its own.
        abort: ends the job, or what stands for that, where a rank is blocked inside MPI; gets the reason.
        revoke: ends all calls that are blocked inside MPI, with an error that says the reason; None where
            that is not to be had.

    Attributes:
        warning_s: after how long the user is warned; 0: never.
        abort_s: after how long the job ends, whatever the wait's own timeout; 0: by that alone.
    """

    def __init__(
        self,
        collector: StateCollector,
        reporter: Reporter,
        *,
        timeout_s: float,
        warning_s: float,
        abort: Callable[[str], None],
        revoke: Callable[[str], None] | None,
    ) -> None:
        self.warning_s = warning_s
        self.abort_s = 0.0
        self._abort = abort
        self._revoke = revoke
        self._revoked_s = 0.0  # when that was done
        self._collector = collector
        self._reporter = reporter
        self._timeout_s = timeout_s
        self._warned: set[int] = set()

    def check(self) -> None:
        """Check whether something waits too long; called again and again by the monitor's thread."""
        if self._oldest_s() < SHORT_S:
            self._warned.clear()
            return
        for wait in self._collector.snapshot(stacks=False).waits:
            if wait.timeout_s is None and not wait.mpi_call:  # another wait's timeout ends it
                continue
            timeout_s = wait.timeout_s or self._timeout_s
            if 0 < self.abort_s < wait.waited_s:
                self._end(wait, self.abort_s, f"longer than {self.abort_s:g} s, after which the job ends")
            elif wait.mpi_call and wait.waited_s > timeout_s:
                self._end_blocked(wait, timeout_s)
            else:
                self._warn(wait, timeout_s)

    def _oldest_s(self) -> float:
        """Return for how long the oldest wait of this rank has lasted; cheap."""
        since_s = [since_s for _, since_s in dict(wait_registry.mpi_calls).values()]
        since_s += [wait.since_s for wait in wait_registry.registered()]
        return time.monotonic() - min(since_s) if since_s else 0.0

    def _warn(self, wait: Wait, timeout_s: float) -> None:
        key = stall_key(WARNING, wait, self._collector.rank)
        if not 0 < self.warning_s < wait.waited_s or key in self._warned:
            return
        self._warned.add(key)
        self._reporter.report(
            WARNING,
            wait,
            self.warning_s,
            lambda states: (
                f"warning: {self._who(wait, states)}. It goes on waiting for {timeout_s:g} s in all "
                "(MPISGD_TIMEOUT_S; MPISGD_STALL_WARNING_S sets when this is said). What the ranks do:"
            ),
        )

    def _end_blocked(self, wait: Wait, timeout_s: float) -> None:
        """End a call that is blocked inside MPI, or the job."""
        longer = f"longer than its limit of {timeout_s:g} s (MPISGD_TIMEOUT_S). It is blocked in there"
        if self._revoke is None:
            self._end(wait, timeout_s, f"{longer}, where no error can be raised, so the job ends")
        elif not self._revoked_s:
            states = self._report(wait, timeout_s, f"{longer}: all communicators of the job are revoked")
            self._revoke(f"{self._who(wait, states)}: {longer}; no group can be used any more")
            self._revoked_s = time.monotonic()
        elif time.monotonic() > self._revoked_s + RETURN_S:
            self._abort(f"{longer}, and is so {RETURN_S:g} s after it was revoked")

    def _end(self, wait: Wait, timeout_s: float, reason: str) -> None:
        """End the job, after one rank has reported why."""
        self._report(wait, timeout_s, reason)
        self._abort(reason)

    def _report(self, wait: Wait, timeout_s: float, reason: str) -> Sequence[RankState]:
        """Report what everyone does, or let another rank report it."""
        states = self._reporter.report(
            TIMEOUT,
            wait,
            timeout_s,
            lambda states: f"{self._who(wait, states)}: {reason}. What the ranks do:",
        )
        if not states:
            time.sleep(REPORT_S)
        return states

    def on_timeout(self) -> str:
        """Report what everyone does, as this thread's wait has timed out; return who is missing.

        Called while the wait is still registered, so that others, too, see that this rank waits.
        """
        waits = self._collector.snapshot(stacks=False).waits
        mine = [wait for wait in waits if wait.thread == threading.current_thread().name]
        if not mine:
            return ""
        wait = mine[-1]
        states = self._reporter.report(
            TIMEOUT,
            wait,
            wait.timeout_s or 0.0,
            lambda states: f"{self._who(wait, states)}. That is the limit. What the ranks do:",
        )
        return self._missing_in_short(wait, states)

    def _who(self, wait: Wait, states: Sequence[RankState]) -> str:
        late = [rank for rank in (missing(wait, states) if states else ()) if rank != self._collector.rank]
        for_whom = f" for {ranks_text(late)}" if late else ""
        return f"rank {self._collector.rank} has waited {wait.waited_s:.1f} s{for_whom} in {place(wait)}"

    def _missing_in_short(self, wait: Wait, states: Sequence[RankState]) -> str:
        """Say of the missing ranks what they do, in one line."""
        if not states:
            return ""
        late = [states[rank] for rank in missing(wait, states) if rank != self._collector.rank]
        texts = [", ".join([activity(state, states), *state.failed_threads]) for state in late[:4]]
        return "; ".join(f"rank {state.rank}: {text}" for state, text in zip(late, texts, strict=False))
