"""What every call of MPI has in common: errors of ours, and a note while it may wait for other ranks."""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mpi4py import MPI

from mpisgd.errors import CollectiveTimeout, MpiFailed, MpisgdError, PeerLost, ShapeMismatch
from mpisgd.threads import waiting
from mpisgd.threads.wait_registry import mpi_calls

__all__ = ["OVERDUE", "mpi_call", "set_apart", "take_turns"]

OVERDUE = (
    "a call of another rank was blocked inside MPI for longer than its timeout, as its report says; no "
    "group can be used any more"
)
KINDS: dict[int, type[MpisgdError]] = {
    MPI.ERR_TRUNCATE: ShapeMismatch,
    **{
        code: PeerLost
        for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
        if (code := getattr(MPI, name, MPI.UNDEFINED)) != MPI.UNDEFINED
    },
}

P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[Any, P], R]


class Revocable(Protocol):
    """What can tell whether a rank has revoked it; see `mpisgd.transport.mpi.Communicator`."""

    calls: Counter[str]

    def is_revoked(self) -> bool:
        """Return whether a rank has revoked it."""


_apart: Revocable | None = None


def set_apart(communicator: Revocable | None) -> None:
    """Let this communicator, a duplicate set apart from `revoke_all`, tell why others are revoked.

    It is revoked by itself, before all others, where that is not done for a loss: a rank has been blocked
    inside MPI for longer than its timeout. MPI's messages keep their order, so whoever finds anything
    revoked knows by this one why.
    """
    global _apart
    _apart = communicator


TURN_S = 0.001  # between two looks at what the thread does that is inside MPI
_turns: "threading.RLock | None" = None


def take_turns() -> None:
    """Let one thread at a time be inside MPI from now on, as thread level SERIALIZED demands."""
    global _turns
    _turns = _turns or threading.RLock()


def _in_turn(
    turns: "threading.RLock", what: str, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Call MPI once no other thread is inside it; raise where that one waits for other ranks there.

    Two threads of one rank, such as one that trains and one that saves a checkpoint, would wait for those of
    another rank crosswise.
    """
    thread = threading.get_ident()
    while not turns.acquire(timeout=TURN_S):
        for call in [call for other, (call, _) in list(mpi_calls.items()) if other != thread]:
            raise MpiFailed(
                f"MPI {what}: another thread waits for other ranks in MPI {call}, and MPI runs at thread "
                "level SERIALIZED, where one thread at a time may call it. Communicate from one thread, or "
                "have MPI started at MULTIPLE"
            )
    try:
        return method(*args, **kwargs)
    finally:
        turns.release()


def mpi_call(
    what: str, *, collective: bool = False, blocks: bool = False
) -> Callable[[Method[P, R]], Method[P, R]]:
    """Turn mpi4py's exceptions into ours, once; count the calls of MPI's own collectives.

    Those that wait for other ranks inside MPI, where nobody can end that, are noted as long as they last.
    """

    def decorate(method: Method[P, R]) -> Method[P, R]:
        def wrapped(self: Revocable, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if collective:
                self.calls[what] += 1
            try:
                if _turns is not None:
                    return _in_turn(_turns, what, called, self, *args, **kwargs)
                return called(self, *args, **kwargs)
            except MPI.Exception as exc:
                raise _translated(what, exc) from exc

        def noted(self: Revocable, /, *args: P.args, **kwargs: P.kwargs) -> R:
            thread = threading.get_ident()
            mpi_calls[thread] = (what, time.monotonic())
            try:
                return method(self, *args, **kwargs)
            finally:
                mpi_calls.pop(thread, None)

        called = noted if blocks else method
        functools.update_wrapper(wrapped, method)
        return wrapped

    return decorate


def _translated(what: str, exc: MPI.Exception) -> MpisgdError:
    """Return the error of ours that says what MPI's has said of its call `what`."""
    if _apart is not None and _apart.is_revoked():  # what MPI calls it then is not always "revoked"
        why = waiting.cancel_reason()
        return CollectiveTimeout(f"MPI {what}: {why if isinstance(why, CollectiveTimeout) else OVERDUE}")
    return KINDS.get(exc.Get_error_class(), MpiFailed)(f"MPI {what}: {exc.Get_error_string()}")
