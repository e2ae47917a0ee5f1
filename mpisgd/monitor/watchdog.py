"""What a rank does about its own long waits: a warning, in the end an error or the end of the job.

A wait of ours ends at its limit by itself and asks here what to say (`at_limit`). A call that is blocked
inside MPI cannot do that: the watch thread sees it and says what everyone does. Where MPI can revoke
communicators that ends the call, and with it all waits of the job. Else, or where it does not, the job ends.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpisgd.core import wait_registry
from mpisgd.monitor.hang_report import missing, place, ranks_text
from mpisgd.monitor.rank_state import RUNS, WAITS, RankState, Wait
from mpisgd.monitor.reporter import Reporter, key_of

if TYPE_CHECKING:
    from mpisgd.monitor.stall_monitor import StallMonitor

__all__ = ["Watchdog"]

WARNING, LIMIT = "warning", "limit"
SHORT_S = 1.0  # waits up to this are looked at no closer
RETURN_S = 10.0  # the freed calls have returned by then (2 to 5 s were seen)
SPEAK_S = 1.0  # after another rank has spoken, this one lets it finish


class Watchdog:
    """The long waits of one rank.

    Args:
        watch: tells what this rank and the others do.
        voice: speaks.
        limit_s: how long a call may be blocked inside MPI, where its operation has no limit of its own.

    Attributes:
        warning_s: after how long the user is warned; 0: never.
        end_s: after how long the job ends, whatever the wait's own limit; 0: by that alone.
        unblock: ends all calls that are blocked inside MPI, with an error that says the reason; None where
            that is not to be had.
        give_up: ends the job, or what stands for that, where a rank is blocked inside MPI; gets the reason.
    """

    def __init__(self, watch: "StallMonitor", voice: Reporter, *, limit_s: float, warning_s: float) -> None:
        self.warning_s = warning_s
        self.end_s = 0.0
        self.give_up: Callable[[str], None] = lambda reason: None
        self.unblock: Callable[[str], None] | None = None
        self._unblocked_s = 0.0  # when that was done
        self._watch = watch
        self._voice = voice
        self._limit_s = limit_s
        self._warned: set[int] = set()

    def tend(self) -> None:
        """Look whether something waits too long; called again and again by the watch thread."""
        if self._oldest_s() < SHORT_S:
            self._warned.clear()
            return
        for wait in self._watch.look(stacks=False).waits:
            if wait.limit_s is None and not wait.inside:  # somebody else sees to that
                continue
            limit_s = wait.limit_s or self._limit_s
            if 0 < self.end_s < wait.waited_s:
                self._end(wait, self.end_s, f"longer than {self.end_s:g} s, after which the job ends")
            elif wait.inside and wait.waited_s > limit_s:
                self._end_blocked(wait, limit_s)
            else:
                self._warn(wait, limit_s)

    def _oldest_s(self) -> float:
        """Return for how long the oldest wait of this rank has lasted; cheap."""
        since_s = [since_s for _, since_s in wait_registry.inside_mpi().values()]
        since_s += [waiter.since_s for waiter in wait_registry.noted()]
        return time.monotonic() - min(since_s) if since_s else 0.0

    def _warn(self, wait: Wait, limit_s: float) -> None:
        key = key_of(WARNING, wait, self._watch.rank)
        if not 0 < self.warning_s < wait.waited_s or key in self._warned:
            return
        self._warned.add(key)
        self._voice.tell(
            WARNING,
            wait,
            self.warning_s,
            lambda views: (
                f"warning: {self._who(wait, views)}. It goes on waiting for {limit_s:g} s in all "
                "(MPISGD_TIMEOUT_S; MPISGD_STALL_WARNING_S sets when this is said). What the ranks do:"
            ),
        )

    def _end_blocked(self, wait: Wait, limit_s: float) -> None:
        """End a call that is blocked inside MPI, or the job."""
        longer = f"longer than its limit of {limit_s:g} s (MPISGD_TIMEOUT_S). It is blocked in there"
        if self.unblock is None:
            self._end(wait, limit_s, f"{longer}, where no error can be raised, so the job ends")
        elif not self._unblocked_s:
            views = self._speak(wait, limit_s, f"{longer}: all communicators of the job are revoked")
            self.unblock(f"{self._who(wait, views)}: {longer}; no group can be used any more")
            self._unblocked_s = time.monotonic()
        elif time.monotonic() > self._unblocked_s + RETURN_S:
            self.give_up(f"{longer}, and is so {RETURN_S:g} s after it was revoked")

    def _end(self, wait: Wait, limit_s: float, reason: str) -> None:
        """Give the job up, after one rank has said why."""
        self._speak(wait, limit_s, reason)
        self.give_up(reason)

    def _speak(self, wait: Wait, limit_s: float, reason: str) -> Sequence[RankState]:
        """Say what everyone does, or let another rank say it."""
        views = self._voice.tell(
            LIMIT, wait, limit_s, lambda views: f"{self._who(wait, views)}: {reason}. What the ranks do:"
        )
        if not views:
            time.sleep(SPEAK_S)
        return views

    def at_limit(self) -> str:
        """Say what everyone does, as this thread's wait is over without success; return who is missing.

        Called before the wait is taken back, so that others, too, see that this rank waits.
        """
        everyone = self._watch.look(stacks=False).waits
        mine = [wait for wait in everyone if wait.thread == threading.current_thread().name]
        if not mine:
            return ""
        wait = mine[-1]
        views = self._voice.tell(
            LIMIT,
            wait,
            wait.limit_s or 0.0,
            lambda views: f"{self._who(wait, views)}. That is the limit. What the ranks do:",
        )
        return self._verdict(wait, views)

    def _who(self, wait: Wait, views: Sequence[RankState]) -> str:
        late = [rank for rank in (missing(wait, views) if views else ()) if rank != self._watch.rank]
        whom = f" for {ranks_text(late)}" if late else ""
        return f"rank {self._watch.rank} has waited {wait.waited_s:.1f} s{whom} in {place(wait)}"

    def _verdict(self, wait: Wait, views: Sequence[RankState]) -> str:
        """Say of the missing ranks what they do, in one line."""
        if not views:
            return ""
        late = [views[rank] for rank in missing(wait, views) if rank != self._watch.rank]
        return "; ".join(f"rank {view.rank} {_in_short(view)}" for view in late[:4])


def _in_short(view: RankState) -> str:
    if view.state == WAITS:
        return f"waits in {place(view.waits[0])}"
    return "is in code of its own" if view.state == RUNS else f"({view.note or view.state})"
