"""`Reporter`: one rank reports a stall to the user, not all of them.

The ranks of a host take turns by the console's lock, and note in their mailbox what they have reported.
Between hosts the lowest one reports: who has asked all others knows which of them are about to do so too.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence

from mpisgd.monitor.console import ConsoleLock, print_to_user
from mpisgd.monitor.hang_report import hang_report, main_wait
from mpisgd.monitor.rank_state import WAITS, RankState, Wait, group_key
from mpisgd.monitor.state_collector import StateCollector

__all__ = ["Reporter", "stall_key"]

TURN_S = 8.0  # who has the lock asks all others first, which takes that long at most
SLACK_S = 1.5  # the ranks' waits began about so far apart


def stall_key(level: str, wait: Wait, rank: int) -> int:
    """Return a number for one stall, the same on all ranks that wait in it; messages are each rank's own."""
    what: tuple[object, ...] = (rank, wait.serial)
    if wait.number:
        what = wait.number, group_key(wait.members, wait.ordinal)
    elif wait.members:
        what = wait.what, wait.members
    return zlib.crc32(f"{level} {what}".encode()) or 1


class Reporter:
    """What this rank reports to its user.

    Args:
        collector: asks the others.
        console: held while this rank reports.
    """

    def __init__(self, collector: StateCollector, console: ConsoleLock) -> None:
        self._collector = collector
        self._console = console

    def report(
        self, level: str, wait: Wait, after_s: float, headline: Callable[[Sequence[RankState]], str]
    ) -> Sequence[RankState]:
        """Report what everyone does, unless another rank has, or is about to.

        Args:
            level: each stall is reported once at each level.
            wait: this rank's own.
            after_s: the other ranks that wait report it when they have waited for so long.
            headline: what the report begins with.

        Returns:
            What everyone does; nothing where another rank has reported it already.
        """
        key, shm = stall_key(level, wait, self._collector.rank), self._collector.shm
        with self._turn():
            if shm.is_reported(key):
                return ()
            states = self._collector.collect(deep=True)
            reported = any(key in state.reported for state in states)
            if not reported and not self._will_be_reported(level, key, after_s, states):
                print_to_user(f"{headline(states)}\n{hang_report(states)}")
                for other in {key, *_keys(level, states)}:
                    shm.note_reported(other)
            return states

    def _will_be_reported(self, level: str, key: int, after_s: float, states: Sequence[RankState]) -> bool:
        """Return whether a rank of a lower host has waited as long in the same stall."""
        first = self._collector.domain[0]
        lower = {rank for domain in self._collector.domains if domain[0] < first for rank in domain}
        return any(
            state.rank in lower
            and state.state == WAITS
            and (wait := main_wait(state)) is not None
            and stall_key(level, wait, state.rank) == key
            and wait.waited_s > after_s - SLACK_S
            for state in states
        )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until nobody else of this host prints, or for TURN_S."""
        held = self._console.acquire(TURN_S, self._collector.sleep)
        try:
            yield
        finally:
            if held:
                self._console.release()


def _keys(level: str, states: Sequence[RankState]) -> set[int]:
    waits = [(state.rank, main_wait(state)) for state in states]
    return {stall_key(level, wait, rank) for rank, wait in waits if wait is not None}
