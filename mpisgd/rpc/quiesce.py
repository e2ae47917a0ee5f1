"""`finish_calls`: all ranks have come to the end of RPC, and no call is under way.

torch waits for that in C++, for ever and without a word. Here the ranks meet by MPI: the stall monitor tells
who is missing, and the error at the timeout names them. A rank that waits for the others still answers their
calls, perhaps for hours, as a parameter server does: its wait begins anew as long as they come.
"""

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch._C._distributed_c10d import Store

from mpisgd.arguments import ranks_text
from mpisgd.core.group import Group
from mpisgd.errors import CollectiveTimeout
from mpisgd.rpc.admission import Admission
from mpisgd.rpc.calls import outstanding_calls
from mpisgd.rpc.tensorpipe import active_calls
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.threads.waiting import Backoff

__all__ = ["finish_calls"]

NAME = "rpc.shutdown"
LOOK_S = 5.0  # how often a rank that waits looks whether it was called


def finish_calls(group: Group, store: Store, admission: Admission, timeout_s: float) -> None:
    """Return when all ranks have come and no call is under way. Collective.

    Args:
        group: all ranks of RPC.
        store: of this start of RPC; tells at a timeout who has come.
        admission: tells when this rank was last called.
        timeout_s: how long to wait for the others while none of them calls this rank.

    Raises:
        CollectiveTimeout: a rank did not come.
    """
    store.set(_arrival(group.rank), "")
    try:
        while True:
            _await_answers()
            if not any(_gather_counts(group, admission, timeout_s)):
                return
    except _TimedOut as exc:
        late = [rank for i, rank in enumerate(group.ranks) if not store.check([_arrival(i)])]
        raise CollectiveTimeout(
            f"{NAME}: waited {timeout_s:.1f} s since the last call from another rank, for "
            f"{ranks_text(late) if late else 'the calls of others'}{f' ({exc})' if str(exc) else ''}"
        ) from None


class _TimedOut(Exception):
    """The others have not come; with what those do that are missing, as far as the monitor knows."""


def _arrival(rank: int) -> str:
    """Return the key that a rank sets when it has come to the end."""
    return f"rank {rank} at the end"


def _await_answers() -> None:
    """Return when no call of this rank is under way; each has a timeout of its own."""

    def about() -> WaitReason:
        calls = outstanding_calls()
        told = ", ".join(sorted({str(call) for call in calls})) or "calls"
        return WaitReason(f"{NAME}, for the answer of {told}", awaited=tuple({call.rank for call in calls}))

    Backoff(threading.TIMEOUT_MAX).wait_for(lambda: active_calls()[0] == 0, about=about)


def _gather_counts(group: Group, admission: Admission, timeout_s: float) -> list[int]:
    """Return how many calls of each rank are under way, once all ranks have come."""
    communicator = group.queue.communicator
    counts, mine = torch.zeros(group.size, dtype=torch.int64), torch.tensor([active_calls()[0]])
    request = communicator.all_gather_request(counts, mine)
    reason = WaitReason(NAME, group.name, members=group.ranks)
    try:
        missing = _wait(lambda: communicator.poll([request]), admission, timeout_s, reason)
    except BaseException:
        communicator.abandon([request], (counts, mine))
        raise
    if missing is not None:
        communicator.abandon([request], (counts, mine))
        raise _TimedOut(missing)
    return [int(count) for count in counts]


def _wait(
    ready: Callable[[], bool], admission: Admission, timeout_s: float, reason: WaitReason
) -> str | None:
    """Return None once `ready()`, else who is missing when nobody has called this rank for `timeout_s`."""
    while True:
        backoff = Backoff(timeout_s)
        called = _CalledLately(admission, backoff)
        if not backoff.wait_for(partial(_either, ready, called), about=lambda: reason):
            return backoff.missing
        if ready():
            return None


def _either(*conditions: Callable[[], bool]) -> bool:
    return any(holds() for holds in conditions)


class _CalledLately:
    """Tells whether this rank was called while it waited; looks every few seconds only."""

    def __init__(self, admission: Admission, backoff: Backoff) -> None:
        self._admission = admission
        self._backoff = backoff
        self._next_s = LOOK_S

    def __call__(self) -> bool:
        waited_s = self._backoff.waited_s
        if waited_s < self._next_s:
            return False
        self._next_s = waited_s + LOOK_S
        return self._admission.seconds_since_data() < LOOK_S
