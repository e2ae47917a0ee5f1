"""`ProcessSetTable`: the process sets of a job, by number."""

from collections.abc import Sequence

from mpisgd.core.group import Group
from mpisgd.horovod.engine.request_table import WORLD
from mpisgd.job.groups import close_group, open_group

__all__ = ["ProcessSetTable"]


class ProcessSetTable:
    """The process sets: the same on all ranks, but for the groups, which only members have.

    Args:
        world: the group of all ranks.

    Attributes:
        members: the global ranks of each set.
        groups: the groups of those that this rank is in.
    """

    def __init__(self, world: Group) -> None:
        self.members: dict[int, Sequence[int]] = {WORLD: world.ranks}
        self.groups: dict[int, Group] = {WORLD: world}
        self._rank, self._job = world.rank, world.job
        self._num_made = 1

    def find(self, ranks: Sequence[int]) -> int | None:
        """Return the number of the process set of these ranks, None if there is none; from any thread."""
        known = list(self.members.items())
        return next((set_id for set_id, members in known if list(members) == list(ranks)), None)

    def add(self, ranks: Sequence[int]) -> int:
        """Make a process set, and return its number. Collective over the job."""
        set_id = self._num_made
        self._num_made += 1
        if self._rank in ranks:
            self.groups[set_id] = open_group(self._job, ranks, name=f"process set {set_id}")
        self.members[set_id] = ranks
        return set_id

    def remove(self, set_id: int) -> None:
        """Remove a process set. Collective over the job."""
        self.members.pop(set_id, None)
        if (group := self.groups.pop(set_id, None)) is not None:
            close_group(group)

    def close(self) -> None:
        """Close the groups of all process sets. Collective over the job."""
        for group in self.groups.values():
            close_group(group)
