"""`NameConflicts`: names that all members of a process set wait for, but in operations of different kinds.

Names of different kinds of operations are independent, so a rank may all-reduce `x` and then gather `x` while
another does it the other way round. But when nothing else is submitted, a program has called the wrong
function, and the ranks would wait for ever. So the first rank waits for a grace period, and then has all
ranks fail the operations at the same place of their order.
"""

from collections.abc import Collection

from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.request import Request

__all__ = ["RESOLVE", "NameConflicts"]

RESOLVE = "resolve"  # the kind of the request by which the first rank has a conflict resolved
GRACE_S = 3.0


class NameConflicts:
    """The conflicts that the first rank knows of, and since when."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}

    def any(self) -> bool:
        """Return whether there are some."""
        return bool(self._since)

    def check(self, found: Collection[tuple[int, str]], now_s: float) -> list[Entry]:
        """Return what to submit to resolve those that have lasted for the grace period.

        Args:
            found: the process sets and labels of all conflicts there are.
            now_s: the time.
        """
        self._since = {conflict: self._since.get(conflict, now_s) for conflict in found}
        lasting = [conflict for conflict, since_s in self._since.items() if now_s - since_s >= GRACE_S]
        for conflict in lasting:
            self._since[conflict] = float("inf")  # about to be resolved
        return [
            Entry(Request(f"{RESOLVE}.{set_id}.{label}", RESOLVE, set_id, op=label))
            for set_id, label in lasting
        ]
