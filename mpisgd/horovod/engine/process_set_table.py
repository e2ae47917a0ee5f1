"""`ProcessSetTable`: the groups of the process sets, by number."""

from collections.abc import Sequence

from mpisgd.core.group import Group
from mpisgd.horovod.engine.request_table import WORLD
from mpisgd.job.groups import close_group, open_group

__all__ = ["ProcessSetTable"]


class ProcessSetTable:
    """The process sets of a job: the same on all ranks, but for the groups, which only members have.

    Args:
        world: the group of all ranks.
    """

    def __init__(self, world: Group) -> None:
        self._rank = world.rank
        self._members: dict[int, Sequence[int]] = {WORLD: world.ranks}
        self._groups: dict[int, Group] = {WORLD: world}
        self._num_made = 1

    def members(self, set_id: int) -> Sequence[int]:
        """Return the global ranks of a process set.

        Raises:
            ValueError: there is none of this number.
        """
        if (ranks := self._members.get(set_id)) is None:
            raise ValueError("Process set provided does not exist, or has not been registered.")
        return ranks

    def group(self, set_id: int) -> Group | None:
        """Return the group of a process set, None where this rank is not in it."""
        return self._groups.get(set_id)

    def find(self, ranks: Sequence[int]) -> int | None:
        """Return the number of the process set of these ranks, None if there is none."""
        return next((i for i, known in list(self._members.items()) if list(known) == list(ranks)), None)

    def add(self, ranks: Sequence[int]) -> int:
        """Make a process set, and return its number. Collective over the job."""
        set_id = self._num_made
        self._num_made += 1
        if self._rank in ranks:
            self._groups[set_id] = open_group(ranks, name=f"process set {set_id}")
        self._members[set_id] = ranks
        return set_id

    def remove(self, set_id: int) -> None:
        """Remove a process set. Collective over the job."""
        self._members.pop(set_id, None)
        if (group := self._groups.pop(set_id, None)) is not None:
            close_group(group)

    def close(self) -> None:
        """Close the groups of all process sets. Collective over the job."""
        for group in self._groups.values():
            close_group(group)
