"""`Reporter`: one rank tells the user about a stall, not all of them.

The ranks of a host take turns by a lock on a nameless file, and note on their board what they have told.
Between hosts the lowest one speaks: who has asked all others knows which of them are about to speak too.
"""

import contextlib
import fcntl
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mpisgd.monitor.hang_report import main_wait, table
from mpisgd.monitor.rank_snapshot import group_key
from mpisgd.monitor.rank_state import WAITS, RankState, Wait

if TYPE_CHECKING:
    from mpisgd.monitor.stall_monitor import StallMonitor

__all__ = ["Reporter", "key_of"]

TURN_S = 8.0  # who has its turn asks all others first, which takes that long at most
SLACK_S = 1.5  # the ranks' waits began about so far apart
NAP_S = 0.02


def key_of(level: str, wait: Wait, rank: int) -> int:
    """Return a number for one stall, the same on all ranks that wait in it; messages are each rank's own."""
    what: tuple[object, ...] = (rank, wait.serial)
    if wait.number:
        what = wait.number, group_key(wait.members, wait.ordinal)
    elif wait.members:
        what = wait.what, wait.members
    return zlib.crc32(f"{level} {what}".encode()) or 1


class Reporter:
    """What this rank tells its user.

    Args:
        watch: asks the others.
        floor: a file that the ranks of this host have open, each for itself; -1: they have none.
        say: takes the text.
    """

    def __init__(self, watch: "StallMonitor", floor: int, say: Callable[[str], None]) -> None:
        self._watch = watch
        self._floor = floor
        self._mine = threading.Lock()
        self._say = say

    def tell(
        self, level: str, wait: Wait, after_s: float, headline: Callable[[Sequence[RankState]], str]
    ) -> Sequence[RankState]:
        """Tell the user what everyone does, unless another rank has, or is about to.

        Args:
            level: each stall is told once at each level.
            wait: this rank's own.
            after_s: the other ranks that wait tell it when they have waited for so long.
            headline: what the report begins with.

        Returns:
            What everyone does; nothing where another rank has told it already.
        """
        key, board = key_of(level, wait, self._watch.rank), self._watch.board
        with self._turn():
            if board.is_told(key):
                return ()
            views = self._watch.ask(deep=True)
            if not any(key in view.told for view in views) and not self._will_be_told(
                level, key, after_s, views
            ):
                self._say(f"{headline(views)}\n{table(views)}")
                waits = [(view, main_wait(view)) for view in views]
                for told in {key, *(key_of(level, other, v.rank) for v, other in waits if other is not None)}:
                    board.note_told(told)
            return views

    def _will_be_told(self, level: str, key: int, after_s: float, views: Sequence[RankState]) -> bool:
        """Return whether a rank of a lower host has waited as long in the same stall."""
        lower = set().union(*(unit for unit in self._watch.units if unit[0] < self._watch.unit[0]))
        return any(
            view.rank in lower
            and view.state == WAITS
            and (wait := main_wait(view)) is not None
            and key_of(level, wait, view.rank) == key
            and wait.waited_s > after_s - SLACK_S
            for view in views
        )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until nobody else of this host is speaking, or for TURN_S."""
        deadline_s, held = time.monotonic() + TURN_S, self._try_turn()
        while not held and time.monotonic() < deadline_s:
            self._watch.pass_time(NAP_S)
            held = self._try_turn()
        try:
            yield
        finally:
            if held:
                self._end_turn()

    def _try_turn(self) -> bool:
        """Take the lock among this process's threads, and that among processes: a file knows no threads."""
        if not self._mine.acquire(blocking=False):
            return False
        try:
            if self._floor >= 0:
                fcntl.flock(self._floor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._mine.release()
            return False
        return True

    def _end_turn(self) -> None:
        if self._floor >= 0:
            fcntl.flock(self._floor, fcntl.LOCK_UN)
        self._mine.release()

    def close(self) -> None:
        """Give the file back."""
        if self._floor >= 0:
            os.close(self._floor)
        self._floor = -1
