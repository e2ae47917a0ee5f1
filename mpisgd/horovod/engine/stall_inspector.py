"""What stalls: which operations wait for which ranks, and what these do instead.

There are two ways to stall. A rank's program does not submit what the others have: its engine still answers,
and all ranks know from their tables which ranks are missing. Then the first rank warns, and may ask the
others in a cycle for the Python stacks of their main threads (`StallInspector`). Or a rank's process does not
run: the others wait for it in the middle of a cycle or of an operation, where none of them can go on to warn.
The job reports that, as it does for any wait (`EngineWait`).
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mpisgd.arguments import ranks_text
from mpisgd.core import wait_registry
from mpisgd.core.group import Group
from mpisgd.core.wait_registry import WaitReason
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.settings import Settings
from mpisgd.job.lifecycle import current_job
from mpisgd.monitor.rank_snapshot import stack_of

__all__ = ["EngineWait", "StallInspector", "main_stack"]

Waiting = Sequence[tuple[Request, frozenset[int]]]

MOST_NAMES = 12
MOST_PENDING = 3


def main_stack() -> str:
    """Return the Python stack of this process's main thread, the innermost call last."""
    return stack_of(sys._current_frames().get(threading.main_thread().ident or 0))


class StallInspector:
    """Warns of operations that some ranks have not submitted; on the first rank.

    Args:
        settings: when to warn, and when to end the job.
        warn: takes a text.
        end: ends the job.

    Attributes:
        wants_stacks: whether the next cycle shall ask all ranks for their stacks.
    """

    def __init__(self, settings: Settings, warn: Callable[[str], None], end: Callable[[], None]) -> None:
        self.wants_stacks = False
        self._settings = settings
        self._warn = warn
        self._end = end
        self._since: dict[tuple[int, str], float] = {}
        self._warned: dict[tuple[int, str], float] = {}
        self._late: Waiting = ()
        self._ends = False

    def check(self, waiting: Waiting, now_s: float) -> None:
        """See what waits for too long: warn, or ask for stacks first."""
        keys = {request.key for request, _ in waiting}
        self._since = {key: self._since.get(key, now_s) for key in keys}
        self._warned = {key: at_s for key, at_s in self._warned.items() if key in keys}
        if self.wants_stacks or not keys:
            return
        self._ends = self._are_over(now_s)
        self._late = [each for each in waiting if self._ends or self._is_late(each[0], now_s)]
        if not self._late:
            return
        self._warned |= dict.fromkeys((request.key for request, _ in self._late), now_s)
        if self._ends or self._settings.stall_stacks:
            self.wants_stacks = True
        else:
            self.report({})

    def _are_over(self, now_s: float) -> bool:
        limit_s = self._settings.stall_end_s
        return limit_s > 0 and any(now_s - since_s > limit_s for since_s in self._since.values())

    def _is_late(self, request: Request, now_s: float) -> bool:
        limit_s = self._settings.stall_warning_s
        last_s = self._warned.get(request.key, self._since[request.key])
        return limit_s > 0 and now_s - last_s > limit_s

    def report(self, stacks: Mapping[int, str]) -> None:
        """Warn of what is late, and end the job where it is time.

        Args:
            stacks: of the main threads, by rank, where they were asked for.
        """
        self.wants_stacks = False
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


class EngineWait:
    """Registers what the engine waits for in the middle of an exchange or of an operation.

    The job reports stalls of these waits as of all others, by Horovod's settings as long as the engine runs.

    Args:
        settings: when to warn, and when to end the job.
        pending: returns what was submitted here and waits.
    """

    def __init__(self, settings: Settings, pending: Callable[[], Sequence[Request]]) -> None:
        self._pending = pending
        self._stalls = current_job().monitor.watchdog
        self._before = self._stalls.warning_s, self._stalls.abort_s
        self._stalls.warning_s, self._stalls.abort_s = settings.stall_warning_s, settings.stall_end_s

    def enter(self, text: str, group: Group) -> None:
        """Register that this thread now waits for the others of a group."""
        wait_registry.register(
            self, time.monotonic(), wait_registry.NO_TIMEOUT_S, lambda: self._hint(text, group)
        )

    def _hint(self, text: str, group: Group) -> WaitReason:
        pending = [f"{request.kind} {request.label!r}" for request in self._pending()]
        more = f" and {len(pending) - MOST_PENDING} more" if len(pending) > MOST_PENDING else ""
        submitted = f" (submitted here: {', '.join(pending[:MOST_PENDING])}{more})" if pending else ""
        return WaitReason(
            text + submitted, group.name, (), group.ranks, group.queue.consistency.number, group.ordinal
        )

    def leave(self) -> None:
        """Register that it waits no more."""
        wait_registry.unregister(self)

    def close(self) -> None:
        """Give the job its own settings back."""
        self._stalls.warning_s, self._stalls.abort_s = self._before
