"""`RequestTable`: what every rank has submitted, the same on all ranks, and what can run because of it.

There is no coordinator that could be late or lost: in every cycle all ranks learn what all have submitted,
put it into their tables in the same order, and so make the same decisions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mpisgd.arguments import ranks_text
from mpisgd.horovod.engine.request import Request, differences

__all__ = ["JOIN", "WORLD", "Decision", "RequestTable"]

WORLD = 0  # the process set of all ranks, the only one that can be joined
NEED_EVERYONE = ("allgather", "alltoall", "broadcast", "reducescatter")
JOIN = Request("join", "join")  # what a joined rank waits for


class Decision(NamedTuple):
    """An operation that every member has submitted, or has joined.

    Attributes:
        request: what to do.
        absent: members that have joined: they take part without tensors of their own.
        error: why it fails on every member; None if it runs.
    """

    request: Request
    absent: frozenset[int] = frozenset()
    error: str | None = None


class RequestTable:
    """The operations that some members have submitted and others have not.

    Args:
        members: the ranks of each process set.
    """

    def __init__(self, members: Mapping[int, Sequence[int]]) -> None:
        self._members = {set_id: frozenset(ranks) for set_id, ranks in members.items()}
        self._pending: dict[tuple[int, str], dict[int, Request]] = {}
        self._joined: dict[int, None] = {}  # in the order of joining

    def add_set(self, set_id: int, ranks: Iterable[int]) -> None:
        """Add a process set."""
        self._members[set_id] = frozenset(ranks)

    def remove_set(self, set_id: int) -> None:
        """Forget a process set; what is pending in it, or will be, is an error."""
        del self._members[set_id]

    def submit(self, rank: int, request: Request) -> None:
        """Note what a rank has submitted."""
        self._pending.setdefault(request.key, {})[rank] = request

    def join(self, rank: int) -> None:
        """Note that a rank has no more data; until all have joined it takes part in everything."""
        self._joined.setdefault(rank)

    def all_joined(self) -> int | None:
        """Return the rank that joined last once all have, and begin anew; None before."""
        if len(self._joined) < len(self._members[WORLD]):
            return None
        last = next(reversed(self._joined))
        self._joined.clear()
        return last

    @property
    def joined(self) -> frozenset[int]:
        """The ranks that have joined."""
        return frozenset(self._joined)

    def unjoin(self) -> None:
        """Forget who has joined: not all of them will."""
        self._joined.clear()

    def decide(self) -> list[Decision]:
        """Take out what every member has submitted or joined, in the order of the first submissions."""
        return [decision for key in list(self._pending) if (decision := self._decide_on(key)) is not None]

    def _decide_on(self, key: tuple[int, str]) -> Decision | None:
        submitted = self._pending[key]
        request = next(iter(submitted.values()))
        if key[0] not in self._members:
            del self._pending[key]
            return Decision(request, error=f"tensor {request.label!r}: its process set was removed")
        absent = frozenset(self._members[key[0]] - submitted.keys())
        if absent and not (key[0] == WORLD and absent <= self._joined.keys()):
            return None
        del self._pending[key]
        return Decision(request, absent, differences(submitted) or _error_without(request, absent))

    def name_conflicts(self) -> list[tuple[int, str]]:
        """Return process sets and labels that every member waits for, but not all in one operation.

        Names begin with the kind of operation; see `mpisgd.horovod.engine.name_conflicts`.
        """
        if len(self._pending) < 2:
            return []
        labels = Counter((set_id, self._label((set_id, name))) for set_id, name in self._pending)
        several = [each for each, times in labels.items() if times > 1]
        return [each for each in several if self._cover_everyone_once(self._keys_of(*each))]

    def _label(self, key: tuple[int, str]) -> str:
        return next(iter(self._pending[key].values())).label

    def _keys_of(self, set_id: int, label: str) -> list[tuple[int, str]]:
        return [key for key in self._pending if key[0] == set_id and self._label(key) == label]

    def resolve(self, set_id: int, label: str) -> list[Decision]:
        """Take out what conflicts under a label, if it still does: an error on all ranks."""
        if (set_id, label) not in self.name_conflicts():
            return []
        keys = self._keys_of(set_id, label)
        together = {rank: r for key in keys for rank, r in self._pending.pop(key).items()}
        error = differences(together)
        requests = {request.key: request for request in together.values()}
        return [Decision(request, frozenset(), error) for request in requests.values()]

    def _cover_everyone_once(self, keys: Sequence[tuple[int, str]]) -> bool:
        ranks = [rank for key in keys for rank in self._pending[key]]
        return len(ranks) == len(set(ranks)) and set(ranks) == self._members[keys[0][0]]

    def waiting_for(self, rank: int, set_id: int, prefix: str) -> list[Request]:
        """Return what is pending in a process set without a rank, under names that begin with `prefix`."""
        return [
            next(iter(submitted.values()))
            for (in_set, name), submitted in self._pending.items()
            if in_set == set_id and name.startswith(prefix) and rank not in submitted
        ]

    def withdraw(self, rank: int, key: tuple[int, str]) -> None:
        """Forget that a rank has submitted an operation, or has joined."""
        if key == JOIN.key:
            self._joined.pop(rank, None)
        elif (submitted := self._pending.get(key)) is not None:
            submitted.pop(rank, None)
            if not submitted:
                del self._pending[key]

    def drop(self, request: Request) -> None:
        """Forget what is pending under a request's name."""
        self._pending.pop(request.key, None)

    def waiting(self) -> list[tuple[Request, frozenset[int]]]:
        """Return what is pending, each with the members that have not submitted it."""
        return [(next(iter(of.values())), self.missing(key)) for key, of in self._pending.items()]

    def missing(self, key: tuple[int, str]) -> frozenset[int]:
        """Return the members without which what is pending under a key, or the join, goes no further."""
        if key == JOIN.key:
            return self._members[WORLD] - self.joined
        if key not in self._pending:
            return frozenset()
        have_come = {*self._pending[key], *(self._joined if key[0] == WORLD else ())}
        return self._members.get(key[0], frozenset()) - have_come


def _error_without(request: Request, absent: frozenset[int]) -> str | None:
    """Say why an operation cannot do without members that have joined: only reductions can, as in Horovod."""
    is_reduction = request.kind == "allgather" and request.op != ""  # see `gather_to_reduce`
    if not absent or request.kind not in NEED_EVERYONE or is_reduction:
        return None
    return (
        f"tensor {request.label!r}: {request.kind.capitalize()} is not supported with Join at this time: "
        f"{ranks_text(absent)} {'has' if len(absent) == 1 else 'have'} joined"
    )
