"""`FailureScope`: what ends where one of some ranks is lost, and goes on where another rank of the job is.

In general the loss of a rank ends all that a job does: all waits, and all communicators. The operations of a
group with a scope of its own go on until one of the members is lost. That is noticed by whoever comes first:
the failure detector, which looks at every scope, or an operation in which MPI tells of it.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from mpisgd.arguments import ranks_text
from mpisgd.errors import MpisgdError, PeerLost, afresh
from mpisgd.threads.scheduling import Cancellation
from mpisgd.threads.waiting import cancelled_by

__all__ = ["FailureScope"]


class FailureScope:
    """Of one group, on one of its members.

    Args:
        ranks: the members, as ranks of the job.
        communicator: of them, apart from those of the job; all others of the group are made of it.
        describe: makes the error that operations raise from then on, of who was lost, in words.

    Attributes:
        at_loss: called once a member is lost, on any thread.
    """

    def __init__(self, ranks: Sequence[int], communicator: Any, describe: Callable[[str], PeerLost]) -> None:
        self.at_loss: list[Callable[[], object]] = []
        self._ranks, self._communicator, self._describe = frozenset(ranks), communicator, describe
        self._cancellation = Cancellation()
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def error(self) -> MpisgdError | None:
        """Why the operations of the group have ended; None while they go on."""
        return self._cancellation.error

    def look(self, lost: Collection[int]) -> None:
        """End the operations if a member is one of those that are lost, or another member has found out."""
        with self._lock:
            if self._is_closed or self.error is not None:
                return
            if not self._ranks.intersection(lost) and not self._communicator.is_revoked():
                return
            self._end(self._describe(self._who()))
        self._tell()

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Let an operation of the group be ended by the loss of a member alone.

        Raises:
            PeerLost: a member was lost: the error of `describe`.
        """
        try:
            with cancelled_by(self._cancellation):
                yield
        except MpisgdError as exc:
            is_told = self.error is not None and type(exc) is type(self.error)
            if is_told or (self.error is None and not isinstance(exc, PeerLost)):
                raise
            with self._lock:
                is_new = self.error is None
                if is_new:
                    self._end(self._describe(self._who()))
            if is_new:
                self._tell()
            assert self.error is not None
            raise afresh(self.error) from exc

    def end(self, error: MpisgdError) -> None:
        """End the operations, since all of the job end; nobody is told of a loss."""
        with self._lock:
            if not self._is_closed and self.error is None:
                self._end(error)

    def close(self) -> None:
        """Look at nothing any more; before the communicators are freed."""
        with self._lock:
            self._is_closed = True

    def _who(self) -> str:
        gone = [self._communicator.global_ranks[rank] for rank in self._communicator.lost()]
        return f"{ranks_text(gone)} of the job" if gone else "one of them"

    def _end(self, error: MpisgdError) -> None:
        self._cancellation.error = error
        self._communicator.revoke_family()

    def _tell(self) -> None:
        for callback in self.at_loss:
            callback()
