"""`Meeting`: what the ranks of a communicator do together once; `Agreement`: what those that are left do."""

import pickle
from collections.abc import Collection
from typing import Any

from mpisgd.errors import MpiFailed

__all__ = ["Agreement", "Meeting"]


class Meeting:
    """Each rank brings something, and all see what was brought.

    Args:
        kind: of call.
        size: how many come.

    Attributes:
        brought: what, by rank.
        made: of it, by whoever is first to need it.
    """

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.brought: dict[int, Any] = {}
        self.made: dict[Any, Any] = {}
        self._size = size

    def bring(self, kind: str, rank: int, what: Any) -> None:
        """Come with something.

        Raises:
            MpiFailed: others have met for another kind of thing; MPI would hang, or mix them up.
        """
        if kind != self.kind:
            raise MpiFailed(f"rank {rank} calls {kind} where others have called {self.kind}")
        self.brought[rank] = what

    def is_complete(self) -> bool:
        """Return whether all have come."""
        return len(self.brought) == self._size

    @property
    def all(self) -> list[Any]:
        """What the ranks have brought, in their order."""
        if "all" not in self.made:
            self.made["all"] = [self.brought[rank] for rank in sorted(self.brought)]
        in_order: list[Any] = self.made["all"]
        return in_order

    @property
    def num_bytes(self) -> int:
        """How many bytes of pickles the ranks have brought."""
        if "bytes" not in self.made:
            self.made["bytes"] = sum(map(len, self.all))
        num_bytes: int = self.made["bytes"]
        return num_bytes

    def all_pickled(self) -> Any:
        """Return new objects of the pickles that the ranks have brought, in their order."""
        if "pickle" not in self.made:  # one of all: each rank's own take as many calls as there are ranks
            self.made["pickle"] = pickle.dumps([pickle.loads(each) for each in self.all])
        return pickle.loads(self.made["pickle"])


class Agreement:
    """What the ranks that are left agree on: lost ones are not waited for.

    Args:
        kind: of call.
        ranks: of the job at its start, in their order.

    Attributes:
        left: places of those that have agreed; empty until they have.
        brought: by place: what each says, and which losses it has taken note of.
        made: as for `Meeting`.
    """

    def __init__(self, kind: str, ranks: tuple[int, ...]) -> None:
        self.kind = kind
        self.left: tuple[int, ...] = ()
        self.brought: dict[int, tuple[bool, frozenset[int]]] = {}
        self.made: dict[Any, Any] = {}
        self._ranks = ranks
        self._gone: frozenset[int] = frozenset()

    def bring(self, kind: str, place: int, holds: bool, acknowledged: frozenset[int]) -> None:
        """Come with an opinion.

        Raises:
            MpiFailed: others have come for another kind of thing.
        """
        if kind != self.kind:
            raise MpiFailed(f"rank {place} calls {kind} where others have called {self.kind}")
        self.brought[place] = holds, acknowledged

    def is_settled(self, lost: Collection[int]) -> bool:
        """Return whether all that are left have come; `lost`: ranks of the job at its start."""
        if not self.left:
            left = tuple(place for place, rank in enumerate(self._ranks) if rank not in lost)
            if any(place not in self.brought for place in left):
                return False
            self.left = left
            self._gone = frozenset(rank for rank in self._ranks if rank in lost)
        return True

    def outcome(self) -> bool:
        """Return whether it holds for all, and nobody was lost that not all have taken note of."""
        return all(holds and self._gone <= known for holds, known in map(self.brought.__getitem__, self.left))
