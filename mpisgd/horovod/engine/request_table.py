"""`RequestTable`: what every rank has submitted, the same on all ranks, and what can run because of it.

There is no coordinator that could be late or lost: in every cycle all ranks learn what all have submitted,
put it into their tables in the same order, and so make the same decisions.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.arguments import ranks_text
from mpisgd.horovod.engine.request import Request, differences

__all__ = ["JOIN", "WORLD", "Decision", "RequestTable", "fuse"]

WORLD = 0  # the process set of all ranks, the only one that can be joined
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
        members: the ranks of each process set, as they are at any time. What is pending in a set that is not
            there, or will be, is an error.

    Attributes:
        joined: the ranks that have no more data, in the order of joining: until all have joined they take
            part in everything.
    """

    def __init__(self, members: Mapping[int, Sequence[int]]) -> None:
        self.joined: dict[int, None] = {}
        self._members = members
        self._pending: dict[tuple[int, str], dict[int, Request]] = {}

    def submit(self, rank: int, request: Request) -> None:
        """Note what a rank has submitted, or that it has joined."""
        if request == JOIN:
            self.joined.setdefault(rank)
        else:
            self._pending.setdefault(request.key, {})[rank] = request

    def all_joined(self) -> int | None:
        """Return the rank that joined last once all have, and begin anew; None before."""
        if len(self.joined) < len(self._members[WORLD]):
            return None
        last = next(reversed(self.joined))
        self.joined.clear()
        return last

    def decide(self) -> list[Decision]:
        """Take out what every member has submitted or joined, in the order of the first submissions."""
        return [decision for key in list(self._pending) if (decision := self._decide_on(key)) is not None]

    def _decide_on(self, key: tuple[int, str]) -> Decision | None:
        submitted = self._pending[key]
        request = next(iter(submitted.values()))
        if key[0] not in self._members:
            del self._pending[key]
            return Decision(request, error=f"tensor {request.label!r}: its process set was removed")
        absent = frozenset(self._members[key[0]]).difference(submitted)
        if absent and not (key[0] == WORLD and absent <= self.joined.keys()):
            return None
        del self._pending[key]
        return Decision(request, absent, differences(submitted) or _error_without(request, absent))

    def name_conflicts(self) -> dict[tuple[int, str], list[tuple[int, str]]]:
        """Return names that every member waits for, but not all in one kind of operation.

        Names begin with the kind of operation; see `NameConflicts`.

        Returns:
            By process set and label, the keys of the operations.
        """
        if len(self._pending) < 2:
            return {}
        found = defaultdict(list)
        for key, submitted in self._pending.items():
            found[key[0], next(iter(submitted.values())).label].append(key)
        return {each: keys for each, keys in found.items() if len(keys) > 1 and self._have_all_once(keys)}

    def _have_all_once(self, keys: Sequence[tuple[int, str]]) -> bool:
        """Return whether each member has submitted one of these operations of a process set."""
        ranks = [rank for key in keys for rank in self._pending[key]]
        return sorted(ranks) == sorted(self._members.get(keys[0][0], ()))

    def resolve(self, set_id: int, label: str) -> list[Decision]:
        """Take out what conflicts under a label, if it still does: an error on all ranks."""
        keys = self.name_conflicts().get((set_id, label), [])
        together = {rank: request for key in keys for rank, request in self._pending.pop(key).items()}
        requests = {request.key: request for request in together.values()}
        return [Decision(request, error=differences(together)) for request in requests.values()]

    def waiting_for(self, rank: int, set_id: int, prefix: str) -> list[Request]:
        """Return requests of a process set that lack a rank, under names that begin with `prefix`."""
        return [
            next(iter(submitted.values()))
            for (in_set, name), submitted in self._pending.items()
            if in_set == set_id and name.startswith(prefix) and rank not in submitted
        ]

    def withdraw(self, rank: int, key: tuple[int, str]) -> None:
        """Forget that a rank has submitted an operation, or has joined."""
        if key == JOIN.key:
            self.joined.pop(rank, None)
        elif (submitted := self._pending.get(key)) is not None:
            submitted.pop(rank, None)
            if not submitted:
                del self._pending[key]

    def drop(self, request: Request) -> None:
        """Forget what is pending under a request's name."""
        self._pending.pop(request.key, None)

    def waiting(self) -> list[tuple[Request, frozenset[int]]]:
        """Return the pending requests, each with the members that have not submitted it."""
        return [(next(iter(of.values())), self.missing(key)) for key, of in self._pending.items()]

    def missing(self, key: tuple[int, str]) -> frozenset[int]:
        """Return the members without which what is pending under a key, or the join, goes no further."""
        if key != JOIN.key and key not in self._pending:
            return frozenset()
        have_come = {*self._pending.get(key, ()), *(self.joined if key[0] == WORLD else ())}
        return frozenset(self._members.get(key[0], ())) - have_come


def _error_without(request: Request, absent: frozenset[int]) -> str | None:
    """Say why an operation cannot do without members that have joined: only reductions can, as in Horovod."""
    gathers_to_reduce = request.kind == "allgather" and request.op != ""  # see `gather_to_reduce`
    if not absent or not request.dtypes or request.kind == "allreduce" or gathers_to_reduce:
        return None
    return (
        f"tensor {request.label!r}: {request.kind.capitalize()} is not supported with Join at this time: "
        f"{ranks_text(absent)} {'has' if len(absent) == 1 else 'have'} joined"
    )


def fuse(decisions: Sequence[Decision], nbytes: Sequence[int], threshold_bytes: int) -> list[list[Decision]]:
    """Group decisions into batches that run as one operation each.

    All-reductions of the same process set, dtype, device, reduction and factors travel together, looking
    past others in between, until a batch holds `threshold_bytes`. Large ones travel alone, and so does
    Adasum, which is defined by tensor.

    Args:
        decisions: in order; none has an error.
        nbytes: how many bytes each moves.
        threshold_bytes: 0: nothing is fused.
    """
    batches: list[list[Decision]] = []
    open_batch: dict[object, tuple[list[Decision], int]] = {}
    for decision, size in zip(decisions, nbytes, strict=True):
        kind = _fused_with(decision) if size < ALONE_BYTES else None
        batch, filled = open_batch.get(kind, ([], 0))
        if kind is None or not batch or filled + size > threshold_bytes:
            batch, filled = [], 0
            batches.append(batch)
        batch.append(decision)
        open_batch[kind] = (batch, filled + size)
    return batches


def _fused_with(decision: Decision) -> object:
    """Return a key that operations which are fused have in common; None: it is not fused."""
    request = decision.request
    if request.kind != "allreduce" or request.op == "Adasum" or len(set(request.dtypes)) != 1:
        return None
    return (
        request.set_id,
        request.op,
        request.dtypes[0],
        request.device,
        request.prescale,
        request.postscale,
        decision.absent,
    )
