"""What does not go on: which operations wait for which ranks, and what these do instead.

Two ways to stall. A rank's program does not submit what the others have: its engine still answers, and all
ranks know from their tables who is missing; the first one speaks, and may ask the others in a cycle for the
Python stack of their main threads. Or a rank's whole process does not run: the others wait for it in the
middle of a cycle or an operation, where none of them can go on to speak. Of that the job's watch tells, as of
any wait (`mpisgd.monitor`).
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mpisgd.core import wait_registry
from mpisgd.core.group import Group
from mpisgd.core.wait_registry import WaitReason
from mpisgd.horovod.engine.request import Request, ranks_text
from mpisgd.horovod.engine.settings import Settings
from mpisgd.job.lifecycle import current_job
from mpisgd.monitor.rank_snapshot import stack_of

__all__ = ["Stalls", "Watchdog", "main_stack"]

Waiting = Sequence[tuple[Request, frozenset[int]]]

MOST_NAMES = 12
MOST_PENDING = 3


def main_stack() -> str:
    """Return what this process's main thread is doing, the innermost call last."""
    return stack_of(sys._current_frames().get(threading.main_thread().ident or 0))


class Stalls:
    """What the first rank does about operations that some ranks have not submitted.

    Args:
        settings: when to speak, and when to end the job.
        warn: takes a text.
        end: ends the job.

    Attributes:
        asks: whether the others are to tell what they are doing, in the next cycle.
    """

    def __init__(self, settings: Settings, warn: Callable[[str], None], end: Callable[[], None]) -> None:
        self.asks = False
        self._settings = settings
        self._warn = warn
        self._end = end
        self._since: dict[tuple[int, str], float] = {}
        self._told: dict[tuple[int, str], float] = {}
        self._late: Waiting = ()
        self._ends = False

    def look(self, waiting: Waiting, now_s: float) -> None:
        """See what waits for too long: speak, or ask the others first."""
        keys = {request.key for request, _ in waiting}
        self._since = {key: self._since.get(key, now_s) for key in keys}
        self._told = {key: at_s for key, at_s in self._told.items() if key in keys}
        if self.asks or not keys:
            return
        self._ends = self._are_over(now_s)
        self._late = [each for each in waiting if self._ends or self._is_late(each[0], now_s)]
        if not self._late:
            return
        self._told |= dict.fromkeys((request.key for request, _ in self._late), now_s)
        if self._ends or self._settings.stall_stacks:
            self.asks = True
        else:
            self.tell({})

    def _are_over(self, now_s: float) -> bool:
        limit_s = self._settings.stall_end_s
        return limit_s > 0 and any(now_s - since_s > limit_s for since_s in self._since.values())

    def _is_late(self, request: Request, now_s: float) -> bool:
        limit_s = self._settings.stall_warning_s
        last_s = self._told.get(request.key, self._since[request.key])
        return limit_s > 0 and now_s - last_s > limit_s

    def tell(self, stacks: Mapping[int, str]) -> None:
        """Say what is late, and end the job where it is time.

        Args:
            stacks: what the main threads of the ranks are doing, where they were asked.
        """
        self.asks = False
        limit_s = self._settings.stall_end_s if self._ends else self._settings.stall_warning_s
        lines = [f"operations wait for more than {limit_s:g} s for ranks that have not submitted them:"]
        lines += _listed([f"{r.kind} {r.label!r}: {ranks_text(missing)}" for r, missing in self._late])
        missing_ranks = sorted(set().union(*(missing for _, missing in self._late)))
        lines += [_stack_text(rank, stacks[rank]) for rank in missing_ranks if rank in stacks]
        if self._ends:
            lines.append("the job ends (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)")
        self._warn("\n".join(lines))
        if self._ends:
            self._end()


def _listed(texts: Sequence[str]) -> list[str]:
    lines = [f"  {text}" for text in texts[:MOST_NAMES]]
    return lines + [f"  ... and {len(texts) - MOST_NAMES} more"] * (len(texts) > MOST_NAMES)


def _stack_text(rank: int, stack: str) -> str:
    body = "\n".join(f"    {line}" for line in stack.rstrip().splitlines())
    return f"  rank {rank} is here meanwhile (innermost call last):\n{body}"


class Watchdog:
    """Where a rank's engine cannot go on: in the middle of what all members of a group do together.

    The job's watch looks on, as it does for all waits, with Horovod's settings as long as the engine runs.

    Args:
        settings: when to speak, and when to end the job.
        pending: tells what was submitted here and waits.
    """

    def __init__(self, settings: Settings, pending: Callable[[], Sequence[Request]]) -> None:
        self._pending = pending
        self._stalls = current_job().monitor.watchdog
        self._before = self._stalls.warning_s, self._stalls.abort_s
        self._stalls.warning_s, self._stalls.abort_s = settings.stall_warning_s, settings.stall_end_s

    def enter(self, text: str, group: Group) -> None:
        """From now on this thread needs the others of a group to go on."""
        began_s, forever = time.monotonic(), wait_registry.NO_TIMEOUT_S
        wait_registry.register(self, began_s, forever, lambda: self._hint(text, group))

    def _hint(self, text: str, group: Group) -> WaitReason:
        pending = [f"{request.kind} {request.label!r}" for request in self._pending()]
        more = f" and {len(pending) - MOST_PENDING} more" if len(pending) > MOST_PENDING else ""
        told = f" (submitted here: {', '.join(pending[:MOST_PENDING])}{more})" if pending else ""
        return WaitReason(
            text + told, group.name, (), group.ranks, group.queue.consistency.number, group.ordinal
        )

    def leave(self) -> None:
        """They have come."""
        wait_registry.unregister(self)

    def close(self) -> None:
        """Look on no more."""
        self._stalls.warning_s, self._stalls.abort_s = self._before
