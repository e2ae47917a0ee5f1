"""`Clashes`: names that all members of a process set wait for, but not in one operation.

Names of different kinds of operations have nothing to do with each other, so a rank may all-reduce `x` and
then gather `x` while another does it the other way round. But when nothing more comes, somebody has called
the wrong function, and the ranks would wait for ever. So the first rank waits for a while, and then has all
ranks settle it at the same place of their order.
"""

from collections.abc import Collection

from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.request import Request

__all__ = ["SETTLE", "Clashes"]

SETTLE = "settle"  # the kind of what is submitted for it
PATIENCE_S = 3.0


class Clashes:
    """What the first rank knows of them."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}

    def any(self) -> bool:
        """Return whether there are some."""
        return bool(self._since)

    def look(self, found: Collection[tuple[int, str]], now_s: float) -> list[Entry]:
        """Return what to submit so that those that last are settled.

        Args:
            found: the process sets and labels of all there are.
            now_s: the time.
        """
        self._since = {clash: self._since.get(clash, now_s) for clash in found}
        lasting = [clash for clash, since_s in self._since.items() if now_s - since_s >= PATIENCE_S]
        for clash in lasting:
            self._since[clash] = float("inf")  # settled in a moment
        return [
            Entry(Request(f"{SETTLE}.{set_id}.{label}", SETTLE, set_id, op=label))
            for set_id, label in lasting
        ]
