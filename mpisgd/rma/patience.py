"""`wait_patiently`: a wait that the loss of a rank does not end: the kernel frees what that rank held."""

from collections.abc import Callable

from mpisgd.errors import PeerLost
from mpisgd.threads.scheduling import now_s, sleep
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.threads.waiting import Backoff

__all__ = ["wait_patiently"]

POLL_S = 0.002


def wait_patiently(
    ready: Callable[[], bool],
    limit_s: float,
    about: Callable[[], WaitReason],
    *,
    ends_with_rank: bool = False,
    own_limit: bool = False,
) -> bool:
    """Return True once `ready()` does, False when `limit_s` seconds are over.

    Every other wait of this process ends as soon as a rank of the job is lost (`PeerLost`). This one goes on:
    what it waits for must come to an end without that rank.

    Args:
        ready: polled.
        limit_s: of the wait.
        about: tells the monitor what this wait is for.
        ends_with_rank: whether the loss of a rank ends it all the same, as between hosts.
        own_limit: see `Backoff`.

    Raises:
        PeerLost: then.
    """
    if ends_with_rank:
        return Backoff(limit_s, own_limit=own_limit).wait_for(ready, about=about)
    deadline_s = now_s() + limit_s
    while True:
        left_s = deadline_s - now_s()
        try:
            return Backoff(max(0.0, left_s), own_limit=own_limit).wait_for(ready, about=about)
        except PeerLost:
            if left_s <= 0:
                return False
            sleep(POLL_S)
