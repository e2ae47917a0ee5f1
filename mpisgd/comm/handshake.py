"""Before anything is sent, the ranks of a group make sure that they are about to do the same thing.

MPI itself does not notice: two swapped calls of equal size give wrong sums in silence, a shorter tensor on
one rank is an error there and a hang elsewhere. So every operation begins with an exchange of 16 bytes:
each rank folds the operation's description into a running 64-bit hash, and everyone learns the smallest and
the largest hash of the group (`Spread`). Equal means that all ranks are here, at the same operation, with
the same history. Only when they differ do descriptions and call sites travel, and every rank raises.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpisgd.comm.waiting import Patience
from mpisgd.errors import CollectiveMismatch, CollectiveTimeout

if TYPE_CHECKING:
    from mpisgd.comm.mpi import Wire

__all__ = ["Exchange", "Handshake", "Operation", "Spread"]


class Operation(NamedTuple):
    """What all ranks of a group must agree on before they start.

    Attributes:
        kind: the public name, `all_reduce`.
        op: name of the reduction, or "".
        dtype: `float32`, or "".
        shape: of the tensor, or whatever else must be equal.
        root: group rank of src or dst, or -1.
        extra: anything else that must be equal, as text.
    """

    kind: str
    op: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    root: int = -1
    extra: str = ""

    def __str__(self) -> str:
        parts = [f"op={self.op}"] if self.op else []
        parts += [f"dtype={self.dtype}", f"shape={list(self.shape)}"] if self.dtype else []
        parts += [f"root={self.root}"] if self.root >= 0 else []
        parts += [self.extra] if self.extra else []
        return f"{self.kind}({', '.join(parts)})"


@lru_cache(maxsize=4096)
def _encoded(operation: Operation) -> bytes:
    return repr(tuple(operation)).encode()


def fold(history: bytes, operation: Operation) -> bytes:
    """Return the 8-byte hash of everything up to and including `operation`."""
    return hashlib.blake2b(history + _encoded(operation), digest_size=8).digest()


class Spread(Protocol):
    """How the ranks of a group learn the smallest and the largest of their digests. One at a time."""

    def start(self, digest: int) -> None:
        """Begin with this rank's digest."""

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest, once it is over."""

    def missing(self) -> str:
        """Say for whom this rank waits, while it is not over."""


class Handshake:
    """The exchange at the beginning of a group's operations. One at a time, by one thread.

    Attributes:
        number: how many operations this rank has begun.
        timeout_s: how long to wait for the other ranks.
    """

    def __init__(self, wire: "Wire", spread: Spread, *, name: str, timeout_s: float) -> None:
        self.wire = wire
        self.spread = spread
        self.name = name
        self.timeout_s = timeout_s
        self.number = 0
        self._history = b""

    def agree(
        self, operation: Operation, site: Callable[[], str], detail: Callable[[], str] | None = None
    ) -> None:
        """Return once every rank of the group is at `operation`.

        Args:
            operation: what this rank is about to do.
            site: tells where the program called it; asked for only when something is wrong.
            detail: tells more when the ranks disagree, in lines; those that differ are shown.

        Raises:
            CollectiveMismatch: on every rank, when one of them is about to do something else. The group
                can be used again: all ranks count the operation as done.
            CollectiveTimeout: other ranks did not come; the group cannot be used again.

        Cost: what the spread costs.
        """
        exchange = self.begin(operation, site, detail)
        exchange.wait(Patience(self.timeout_s))
        exchange.verify()

    def begin(
        self, operation: Operation, site: Callable[[], str], detail: Callable[[], str] | None = None
    ) -> "Exchange":
        """Start what `agree` does; the caller advances the exchange to its end."""
        self.number += 1
        self._history = fold(self._history, operation)
        return Exchange(self, operation, site, detail, int.from_bytes(self._history, "little"))

    def resume_after(self, low: int, high: int) -> None:
        """Give all ranks the same history again after a disagreement."""
        self._history = low.to_bytes(8, "little") + high.to_bytes(8, "little")

    def compare(self, mine: str, detail: str) -> str:
        """Gather what every rank was about to do, and say who differs. Collective."""
        groups: dict[tuple[int, str, str], list[int]] = defaultdict(list)
        for rank, view in enumerate(self.wire.all_gather_object((self.number, mine, detail))):
            groups[view].append(rank)
        common = set.intersection(*(set(more.splitlines()) for _, _, more in groups))
        lines = [f"the ranks of group '{self.name}' do not agree on what comes next:"]
        for (number, text, more), ranks in sorted(groups.items(), key=lambda item: item[1]):
            lines.append(f"  {_ranks(ranks)}: operation {number}, {text}")
            lines += [f"      {line}" for line in _only_here(more, common)]
        return "\n".join(lines)


def _only_here(detail: str, common: set[str]) -> list[str]:
    """Return the lines of `detail` that not all ranks have; the first few of many."""
    lines = [line for line in detail.splitlines() if line not in common]
    more = [f"... and {len(lines) - 5} more"] if len(lines) > 5 else []
    return lines[:5] + more


class Exchange:
    """One handshake under way, and the verdict at its end."""

    def __init__(
        self,
        handshake: Handshake,
        operation: Operation,
        site: Callable[[], str],
        detail: Callable[[], str] | None,
        digest: int,
    ) -> None:
        self._handshake = handshake
        self._operation = operation
        self._site = site
        self._detail = detail
        self.advance = handshake.spread.advance
        handshake.spread.start(digest)

    def wait(self, patience: Patience) -> None:
        """Go to the end, or raise CollectiveTimeout."""
        if not self.advance() and not patience.wait_for(self.advance):
            raise CollectiveTimeout(self._who_is_missing(patience.waited_s))

    def verify(self) -> None:
        """Raise CollectiveMismatch if the ranks disagree. Call when the exchange is over."""
        low, high = self._handshake.spread.extremes()
        if low != high:
            self._handshake.resume_after(low, high)
            detail = self._detail() if self._detail is not None else ""
            raise CollectiveMismatch(self._handshake.compare(f"{self._operation}  at {self._site()}", detail))

    def _who_is_missing(self, waited_s: float) -> str:
        wire = self._handshake.wire
        return (
            f"{self._operation} at {self._site()}: rank {wire.rank} of {wire.size} (group "
            f"'{self._handshake.name}', operation {self._handshake.number}) has waited {waited_s:.1f} s "
            f"for {self._handshake.spread.missing()}. Raise MPISGD_TIMEOUT_S if ranks may be that far apart"
        )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
