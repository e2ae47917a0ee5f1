"""Before anything is sent, the ranks of a group make sure that they are about to do the same thing.

MPI itself does not notice: two swapped calls of equal size give wrong sums in silence, a shorter tensor on
one rank is an error there and a hang elsewhere. So every operation begins with an exchange of 16 bytes:
each rank folds the operation's description into a running 64-bit hash, and everyone learns the smallest and
the largest hash of the group (`DigestExchange`). Equal means that all ranks are here, at the same operation,
with the same history. Only when they differ do descriptions and call sites travel, and every rank raises.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from mpisgd.core.waiting import Backoff
from mpisgd.errors import CollectiveMismatch, CollectiveTimeout

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["ConsistencyCheck", "ConsistencyChecker", "DigestExchange", "Operation", "ranks_text"]

LEFT_TAG = 40  # of the queue's communicator, above the rounds of a dissemination and below an algorithm's


class Operation(NamedTuple):
    """What all ranks of a group must agree on before they start.

    Attributes:
        kind: the public name, `all_reduce`.
        op: name of the reduction, or "".
        dtype: `float32`, or "".
        shape: of the tensor, or whatever else must be equal.
        root: group rank of src or dst, or -1.
        extra: anything else that must be equal, as text.
        device: `cuda` for tensors on a device, "" for those of the CPU.
    """

    kind: str
    op: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    root: int = -1
    extra: str = ""
    device: str = ""

    def __str__(self) -> str:
        parts = [f"op={self.op}"] if self.op else []
        parts += [f"dtype={self.dtype}", f"shape={list(self.shape)}"] if self.dtype else []
        parts += [f"root={self.root}"] if self.root >= 0 else []
        parts += [f"device={self.device}"] if self.device else []
        parts += [self.extra] if self.extra else []
        return f"{self.kind}({', '.join(parts)})"


@lru_cache(maxsize=4096)
def _encoded(operation: Operation) -> bytes:
    return repr(tuple(operation)).encode()


def fold(history: bytes, operation: Operation) -> bytes:
    """Return the 8-byte hash of everything up to and including `operation`."""
    return hashlib.blake2b(history + _encoded(operation), digest_size=8).digest()


class DigestExchange(Protocol):
    """How the ranks of a group learn the smallest and the largest of their digests. One at a time."""

    def start(self, digest: int) -> None:
        """Begin with this rank's digest."""

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest, once it is over."""

    def sleep(self, limit_s: float) -> bool:
        """Sleep for so long, or until somebody wakes this rank; False where nobody would."""

    def missing(self) -> str:
        """Say for whom this rank waits, while it is not over."""


class ConsistencyChecker:
    """The exchange at the beginning of a group's operations. One at a time, by one thread.

    Attributes:
        number: how many operations this rank has begun.
        timeout_s: how long to wait for the other ranks.
    """

    def __init__(self, wire: "Communicator", spread: DigestExchange, *, name: str, timeout_s: float) -> None:
        self.wire = wire
        self.spread = spread
        self.name = name
        self.timeout_s = timeout_s
        self.number = 0
        self._history = b""

    def begin(
        self,
        operation: Operation,
        site: Callable[[], str],
        detail: Callable[[], str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> "ConsistencyCheck":
        """Start to find out whether every rank of the group is at `operation`; see `ConsistencyCheck`.

        Args:
            operation: what this rank is about to do.
            site: tells where the program called it; asked for only when something is wrong.
            detail: tells more when the ranks disagree, in lines; those that differ are shown.
            before: called before this rank tells the others anything.

        Cost: what the spread costs.
        """
        self.number += 1
        if before is not None:
            before()
        self._history = fold(self._history, operation)
        return ConsistencyCheck(self, operation, site, detail, int.from_bytes(self._history, "little"))

    def note(self, operation: Operation) -> None:
        """Count an operation that meets nobody; the next one that does will compare it, too."""
        self.number += 1
        self._history = fold(self._history, operation)

    def leave(self) -> None:
        """Tell the other members that this rank gives the group up and comes to none of its operations."""
        word = torch.zeros(1, dtype=torch.uint8)
        others = [rank for rank in range(self.wire.size) if rank != self.wire.rank]
        self.wire.abandon([self.wire.isend(word, rank, LEFT_TAG) for rank in others], word)

    def somebody_left(self) -> bool:
        """Return whether another member has given the group up, as far as is known here."""
        return self.wire.probe(LEFT_TAG) is not None

    @property
    def me(self) -> int:
        """This rank, as messages call it."""
        return self.wire.global_ranks[self.wire.rank]

    def text_of(self, operation: Operation) -> str:
        """Return what messages say of an operation: its root as a rank of the job."""
        if operation.root < 0:
            return str(operation)
        return str(operation._replace(root=self.wire.global_ranks[operation.root]))

    def resume_after(self, low: int, high: int) -> None:
        """Give all ranks the same history again after a disagreement."""
        self._history = low.to_bytes(8, "little") + high.to_bytes(8, "little")

    def compare(self, mine: str, detail: str) -> str:
        """Gather what every rank was about to do, and say who differs. Collective.

        Raises:
            CollectiveTimeout: another rank gave up its operation earlier, so it has not come to compare.
        """
        self._meet_again(mine)
        groups: dict[tuple[int, str, str], list[int]] = defaultdict(list)
        views = self.wire.all_gather_object((self.number, mine, detail))
        for rank, view in zip(self.wire.global_ranks, views, strict=True):
            groups[view].append(rank)
        common = set.intersection(*(set(more.splitlines()) for _, _, more in groups))
        lines = [f"the ranks of group '{self.name}' do not agree on what comes next:"]
        for (number, text, more), ranks in sorted(groups.items(), key=lambda item: item[1]):
            lines.append(f"  {ranks_text(ranks)}: operation {number}, {text}")
            lines += [f"      {line}" for line in _only_here(more, common)]
        return "\n".join(lines)

    def _meet_again(self, mine: str) -> None:
        """See that everyone is here: one that gave up waiting has left its digest, but does not compare."""
        everyone_is_here = self.wire.barrier_request()
        patience = Backoff(self.timeout_s)
        patience.wait_for(lambda: self.wire.poll([everyone_is_here]) or self.somebody_left())
        if not self.wire.poll([everyone_is_here]):
            raise CollectiveTimeout(
                f"{mine}: rank {self.me} (group '{self.name}', operation {self.number}) finds another rank "
                f"at something else, which has given that up before: it did not come within "
                f"{patience.waited_s:.1f} s to compare. What it raised tells more"
            )


def _only_here(detail: str, common: set[str]) -> list[str]:
    """Return the lines of `detail` that not all ranks have; the first few of many."""
    lines = [line for line in detail.splitlines() if line not in common]
    more = [f"... and {len(lines) - 5} more"] if len(lines) > 5 else []
    return lines[:5] + more


class ConsistencyCheck:
    """One handshake under way, and the verdict at its end."""

    def __init__(
        self,
        handshake: ConsistencyChecker,
        operation: Operation,
        site: Callable[[], str],
        detail: Callable[[], str] | None,
        digest: int,
    ) -> None:
        self._consistency = handshake
        self._operation = operation
        self._site = site
        self._detail = detail
        self.advance = handshake.spread.advance
        handshake.spread.start(digest)

    def wait(self, patience: Backoff) -> None:
        """Go to the end, where every rank has come; one who has just found that some are missing calls it.

        Raises:
            CollectiveTimeout: other ranks did not come; the group cannot be used again.
        """
        if not patience.wait_for(self.advance, self._consistency.spread.sleep):
            raise CollectiveTimeout(self._who_is_missing(patience))

    def differs(self) -> bool:
        """Return whether it is over and the ranks are not about to do the same thing."""
        low, high = self._consistency.spread.extremes() if self.advance() else (0, 0)
        return low != high

    def verify(self) -> None:
        """See that all ranks are about to do the same thing. Call when the exchange is over.

        Raises:
            CollectiveMismatch: on every rank, when one of them is about to do something else. The group
                can be used again: all ranks count the operation as done.
        """
        low, high = self._consistency.spread.extremes()
        if low != high:
            self._consistency.resume_after(low, high)
            detail = self._detail() if self._detail is not None else ""
            raise CollectiveMismatch(self._consistency.compare(f"{self._what}  at {self._site()}", detail))

    @property
    def _what(self) -> str:
        return self._consistency.text_of(self._operation)

    def _who_is_missing(self, patience: Backoff) -> str:
        shake, seen = self._consistency, f" ({patience.verdict})" if patience.verdict else ""
        return (
            f"{self._what} at {self._site()}: rank {shake.me} (group '{shake.name}', operation "
            f"{shake.number}) has waited {patience.waited_s:.1f} s for {shake.spread.missing()}{seen}. Raise "
            "MPISGD_TIMEOUT_S or the group's own timeout if ranks may be that far apart"
        )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
