"""Before anything is sent, the ranks of a group make sure that they are about to do the same thing.

MPI itself does not notice: two swapped calls of equal size give wrong sums in silence, a shorter tensor on
one rank is an error there and a hang elsewhere. So every operation begins with an exchange of 16 bytes:
each rank folds its hash of the operation's description into a running 64-bit hash, and everyone learns the
smallest and the largest hash of the group (`DigestExchange`). Equal means that all ranks are here, at the
same operation, with the same history. Only when they differ do descriptions and call sites travel, and every
rank raises.
"""

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from mpisgd.core.mismatch import COMPARED, Intention, in_short, mismatch_of
from mpisgd.core.owner import Owner
from mpisgd.errors import CollectiveMismatch, CollectiveTimeout
from mpisgd.interfaces.communicator import Communicator, DigestExchange
from mpisgd.threads.waiting import Backoff

__all__ = ["ConsistencyCheck", "ConsistencyChecker", "Operation", "digest_of"]

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
        owner: the optimizer it belongs to, if any; see `mpisgd.core.owner`.
        when: what tells this call from others of the operation, such as the step, where that must be equal.
    """

    kind: str
    op: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    root: int = -1
    extra: str = ""
    device: str = ""
    owner: Owner | None = None
    when: str = ""

    def __str__(self) -> str:
        parts = [f"op={self.op}"] if self.op else []
        parts += [f"dtype={self.dtype}", f"shape={list(self.shape)}"] if self.dtype else []
        parts += [f"root={self.root}"] if self.root >= 0 else []
        parts += [f"device={self.device}"] if self.device else []
        parts += [text for text in (self.extra, self.when) if text]
        parts += [] if self.owner is None else [f"of {self.owner}"]
        return f"{self.kind}({', '.join(parts)})"


MULTIPLIER = 6364136223846793005  # Knuth's, of a linear congruential generator modulo 2**64
MASK = 2**64 - 1


def digest_of(operation: Operation) -> int:
    """Return the 64-bit hash of an operation that is always the same, so without `when`."""
    assert not operation.when
    return _digest(operation[:-1])


@lru_cache(maxsize=4096)
def _digest(recurring: tuple[object, ...]) -> int:
    """Return the 64-bit hash of an operation's fields. Without `when`: each call would be another entry."""
    return _hash(repr(recurring))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def fold(history: int, operation: Operation) -> int:
    """Return the 64-bit hash of everything up to and including `operation`."""
    if operation.when:
        history = (history * MULTIPLIER + _hash(operation.when)) & MASK
    return (history * MULTIPLIER + _digest(operation[:-1])) & MASK


# With which exit code this process leaves its program by `sys.exit`; 0 until it does.
exit_code = 0


class ConsistencyChecker:
    """The consistency checks of a group's operations. One at a time, by one thread.

    Attributes:
        number: how many operations this rank has begun.
        history: the hash of all of them.
        past: the hash of those before the latest one.
        timeout_s: how long to wait for the other ranks.
    """

    def __init__(
        self, communicator: Communicator, digest_exchange: DigestExchange, *, name: str, timeout_s: float
    ) -> None:
        self.communicator = communicator
        self.digest_exchange = digest_exchange
        self.name = name
        self.timeout_s = timeout_s
        self.number = 0
        self.history = self.past = 0

    def begin(self, check: "ConsistencyCheck", before: Callable[[], None] | None = None) -> None:
        """Start to compare the operation of `check` with those of the other ranks.

        Args:
            check: of what this rank is about to do; not begun yet.
            before: called before this rank tells the others anything.

        Cost: that of the digest exchange.
        """
        self.number += 1
        if before is not None:
            before()
        check.checker = self
        self.past, self.history = self.history, fold(self.history, check.operation)
        self.digest_exchange.start(self.history)

    def agree_soon(self, check: "ConsistencyCheck", digest: int) -> bool:
        """Start to compare an operation of which the digest is known, and wait a moment for the other ranks.

        Args:
            check: of what this rank is about to do; not on its way.
            digest: `digest_of` its operation.

        Returns:
            Whether all ranks have come to the same. Where not, wait for them and then verify the check.
        """
        self.number += 1
        check.checker = self
        self.past = past = self.history
        self.history = history = (past * MULTIPLIER + digest) & MASK
        exchange = self.digest_exchange
        exchange.start(history)
        return exchange.agree_soon()

    def note(self, operation: Operation) -> None:
        """Count an operation that is not compared; the next one that is compares it, too."""
        self.number += 1
        self.history = fold(self.history, operation)

    def leave(self) -> None:
        """Tell the other members that this rank gives the group up and comes to none of its operations."""
        word = torch.zeros(1, dtype=torch.uint8)
        others = [rank for rank in range(self.communicator.size) if rank != self.communicator.rank]
        self.communicator.abandon([self.communicator.isend(word, rank, LEFT_TAG) for rank in others], word)

    def somebody_left(self) -> bool:
        """Return whether another member has given the group up, as far as is known here."""
        return self.communicator.probe(LEFT_TAG) is not None

    @property
    def me(self) -> int:
        """This rank, as messages call it."""
        return self.communicator.global_ranks[self.communicator.rank]

    def text_of(self, operation: Operation) -> str:
        """Describe an operation for messages: its root as a rank of the job."""
        if operation.root < 0:
            return str(operation)
        return str(operation._replace(root=self.communicator.global_ranks[operation.root]))

    def compare(self, operation: Operation, site: str, detail: str) -> CollectiveMismatch:
        """Gather what every rank was about to do; return the error that tells which ranks differ. Collective.

        Args:
            operation: of this rank.
            site: where it was called.
            detail: more about it, in lines.

        Raises:
            CollectiveTimeout: another rank timed out earlier, so it does not come to compare.
        """
        text = self.text_of(operation)
        self._wait_for_all(f"{text} at {site}")
        fields = tuple(_in_words(getattr(operation, name)) for name in COMPARED)
        mine = Intention(exit_code, self.number, self.past, operation.kind, fields, text, site, detail)
        told = self.communicator.all_gather_object(mine)
        return mismatch_of(self.name, dict(zip(self.communicator.global_ranks, told, strict=True)))

    def _wait_for_all(self, mine: str) -> None:
        """Wait until all ranks compare: one that has timed out has left its digest, but does not come."""
        barrier = self.communicator.barrier_request()
        backoff = Backoff(self.timeout_s)
        backoff.wait_for(lambda: self.communicator.poll([barrier]) or self.somebody_left())
        if not self.communicator.poll([barrier]):
            raise CollectiveTimeout(
                f"{mine}: rank {self.me} (group '{self.name}', operation {self.number}) found another rank "
                f"at a different operation, and that rank did not come within {backoff.waited_s:.1f} s to "
                "compare them: it has timed out before. See the error that it raised"
            )


def _in_words(value: object) -> str:
    return str(list(value)) if type(value) is tuple else "" if value in (None, -1) else str(value)


class ConsistencyCheck:
    """The consistency check of one operation, and its result. See `ConsistencyChecker.begin`.

    Args:
        operation: what this rank is about to do.
        site: tells where the program called it; asked for only when something is wrong.
        detail: tells more when the ranks disagree, in lines; those that differ are shown.

    Attributes:
        operation: as given.
        checker: who has begun it; None before.
    """

    __slots__ = ("_detail", "_site", "checker", "operation")

    def __init__(
        self,
        operation: Operation,
        site: Callable[[], str] | None = None,
        detail: Callable[[], str] | None = None,
    ) -> None:
        self.operation = operation
        self.checker: Any = None
        self._site = site
        self._detail = detail

    def site(self) -> str:
        """Return where the program called the operation."""
        return "unknown place" if self._site is None else self._site()

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether all ranks have come."""
        over: bool = self.checker.digest_exchange.advance()
        return over

    def wait(self, backoff: Backoff) -> None:
        """Wait until every rank has come; call it after `advance` has returned False.

        Raises:
            CollectiveTimeout: other ranks did not come; the group cannot be used again.
        """
        exchange: DigestExchange = self.checker.digest_exchange
        if not backoff.wait_for(exchange.advance, exchange.sleep, yield_s=exchange.yield_s):
            raise CollectiveTimeout(self._who_is_missing(backoff))

    def differs(self) -> bool:
        """Return whether it is over and the ranks are not about to do the same thing."""
        low, high = self.checker.digest_exchange.extremes() if self.advance() else (0, 0)
        return bool(low != high)

    def verify(self) -> None:
        """Raise unless all ranks are about to do the same thing. Call when the exchange is over.

        Raises:
            CollectiveMismatch: on every rank, when one of them is about to do something else. The group
                can be used again: all ranks count the operation as done.
        """
        checker: ConsistencyChecker = self.checker
        low, high = checker.digest_exchange.extremes()
        if low != high:
            checker.history = (low * MULTIPLIER + high) & MASK  # the same on all ranks again
            detail = self._detail() if self._detail is not None else ""
            raise checker.compare(self.operation, self.site(), detail)

    def _who_is_missing(self, backoff: Backoff) -> str:
        checker, seen = self.checker, f" ({backoff.missing})" if backoff.missing else ""
        return (
            f"rank {checker.me} has waited {backoff.waited_s:.1f} s for {checker.digest_exchange.missing()}"
            f"{seen}, at {self.site()} in {in_short(checker.text_of(self.operation))}, operation "
            f"{checker.number} of group '{checker.name}'. Raise MPISGD_TIMEOUT_S or the group's own timeout "
            "if ranks may be that far apart"
        )
