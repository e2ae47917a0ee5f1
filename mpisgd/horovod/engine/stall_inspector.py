"""What stalls: which operations wait for which ranks, and what these do instead.

There are three ways to stall. A rank's program does not submit what the others have: its engine still
answers, and all ranks know from their tables which ranks are missing. Then the first rank warns, and may ask
the others in a cycle for the Python stacks of their main threads (`StallInspector`). Or all members have
submitted a name, but in operations of different kinds (`NameConflicts`). Or a rank's process does not run:
the others wait for it in the middle of a cycle or of an operation, where none of them can go on to warn. The
job reports that, as it does for any wait (`engine_wait`).
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from mpisgd.arguments import ranks_text
from mpisgd.core.group import Group
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.settings import Settings
from mpisgd.monitor.rank_snapshot import stack_of
from mpisgd.threads import wait_registry
from mpisgd.threads.wait_registry import WaitReason

__all__ = ["NameConflicts", "StallInspector", "engine_wait", "main_stack", "registered_wait"]

Waiting = Sequence[tuple[Request, frozenset[int]]]

MOST_NAMES = 12
MOST_PENDING = 3
GRACE_S = 3.0  # how long a conflict of names may last


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
        warning_s, end_s = self._settings.stall_warning_s, self._settings.stall_end_s
        self._ends = end_s > 0 and now_s - min(self._since.values()) > end_s
        last_s = self._since | self._warned
        late = {key for key in keys if warning_s > 0 and now_s - last_s[key] > warning_s}
        self._late = [each for each in waiting if self._ends or each[0].key in late]
        if not self._late:
            return
        self._warned |= dict.fromkeys((request.key for request, _ in self._late), now_s)
        if self._ends or self._settings.stall_stacks:
            self.wants_stacks = True
        else:
            self.report({})

    def report(self, stacks: Mapping[int, str]) -> None:
        """Warn of what is late, and end the job where it is time.

        Args:
            stacks: of the main threads, by rank, where they were asked for.
        """
        self.wants_stacks = False
        limit_s = self._settings.stall_end_s if self._ends else self._settings.stall_warning_s
        lines = [f"operations wait for more than {limit_s:g} s for ranks that have not submitted them:"]
        lines += [f"  {request}: {ranks_text(missing)}" for request, missing in self._late[:MOST_NAMES]]
        if len(self._late) > MOST_NAMES:
            lines.append(f"  ... and {len(self._late) - MOST_NAMES} more")
        for rank in sorted(stacks.keys() & set().union(*(missing for _, missing in self._late))):
            lines.append(f"  rank {rank} is here meanwhile (innermost call last):")
            lines += [f"    {line}" for line in stacks[rank].rstrip().splitlines()]
        if self._ends:
            lines.append("the job ends (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)")
        self._warn("\n".join(lines))
        if self._ends:
            self._end()


class NameConflicts:
    """Names that all members wait for, but in operations of different kinds; on the first rank.

    Names of different kinds of operations are independent, so a rank may all-reduce `x` and then gather `x`
    while another does it the other way round. But when nothing else is submitted, a program has called the
    wrong function, and the ranks would wait for ever. So the first rank waits for a grace period, and then
    has all ranks fail the operations at the same place of their order.

    Attributes:
        since_s: since when there is each conflict that is known, by process set and label.
    """

    def __init__(self) -> None:
        self.since_s: dict[tuple[int, str], float] = {}

    def check(self, found: Collection[tuple[int, str]], now_s: float) -> list[tuple[int, str]]:
        """Return which conflicts have lasted for the grace period; each of them once.

        Args:
            found: the process sets and labels of all conflicts there are.
            now_s: the time.
        """
        self.since_s = {conflict: self.since_s.get(conflict, now_s) for conflict in found}
        lasting = [conflict for conflict, since_s in self.since_s.items() if now_s - since_s >= GRACE_S]
        self.since_s |= dict.fromkeys(lasting, float("inf"))
        return lasting


@contextlib.contextmanager
def registered_wait(
    reason: Callable[[], WaitReason], since_s: float, wake: Callable[[], None] | None = None
) -> Iterator[None]:
    """Register that this thread waits; see `wait_registry.register`."""
    key = object()
    wait_registry.register(key, since_s, wait_registry.NO_TIMEOUT_S, reason, wake)
    try:
        yield
    finally:
        wait_registry.unregister(key)


def engine_wait(
    text: str, group: Group, pending: Callable[[], Sequence[Request]]
) -> contextlib.AbstractContextManager[None]:
    """Register what the engine waits for in the middle of an exchange or of an operation.

    Args:
        text: what this thread does meanwhile, in words.
        group: for whose other ranks it waits.
        pending: returns what was submitted here and waits.
    """

    def reason() -> WaitReason:
        told = [str(request) for request in pending()]
        more = f" and {len(told) - MOST_PENDING} more" if len(told) > MOST_PENDING else ""
        submitted = f" (submitted here: {', '.join(told[:MOST_PENDING])}{more})" if told else ""
        number = group.queue.consistency.number
        return WaitReason(text + submitted, group.name, (), group.ranks, number, group.ordinal)

    return registered_wait(reason, time.monotonic())
