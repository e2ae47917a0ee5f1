"""`monitored_barrier` of our groups; `torch.distributed.monitored_barrier` hands them over.

Its errors say what gloo's say, in ranks of the group, and below that what ours do.
"""

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from mpisgd.collectives.barrier import barrier
from mpisgd.core.group import Group
from mpisgd.errors import CollectiveTimeout, InvalidArgument

__all__ = ["monitored_barrier", "pass_monitored"]

AT_ONCE_S = 1e-3  # for a timeout of 0, with which only the last ranks pass


def monitored_barrier(
    group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of the group has called it; the error names the ranks that have not.

    `torch.distributed.monitored_barrier` calls this for groups of this backend, with the same arguments. A
    rank outside the group gets a warning and returns.

    Args:
        group: a process group of this backend; None: the default group.
        timeout: how long every rank waits, a number in seconds; default the group's timeout.
        wait_all_ranks: True: group rank 0 names all missing ranks; False: the first one.

    Raises:
        CollectiveTimeout: ranks are missing. The group cannot be used again.
        InvalidArgument: a group of another backend, or an invalid `timeout`.
    """
    if distributed_c10d._rank_not_in_group(group):
        distributed_c10d._warn_not_in_group("monitored_barrier")
        return
    group = group or distributed_c10d._get_default_group()
    if not isinstance(getattr(group, "mpisgd_group", None), Group):
        raise InvalidArgument(f"monitored_barrier: the group is a {type(group).__name__}, not of 'mpisgd'")
    pass_monitored(group.mpisgd_group, timeout, wait_all_ranks)


def pass_monitored(group: Group, timeout: timedelta | float | None, wait_all_ranks: bool) -> None:
    """Do what `monitored_barrier` does, in a group of ours."""
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    try:
        barrier(group, timeout_s=AT_ONCE_S if limit_s == 0 else limit_s)
    except CollectiveTimeout as exc:
        spent_s = group.queue.consistency.timeout_s if limit_s is None else limit_s
        raise CollectiveTimeout(
            f"[Rank {group.rank}]: {_failure(group, spent_s, wait_all_ranks)}\n{exc}"
        ) from exc


def _failure(group: Group, timeout_s: float, wait_all_ranks: bool) -> str:
    """Return the message that gloo has for this case."""
    if group.rank != 0:
        return (
            f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank 0. Please check rank 0 logs for faulty rank."
        )
    monitor = group.job.monitor
    late = [] if monitor is None else monitor.late_in(group)
    if timeout_s == 0 or not late:
        return f"Rank 0 timed out in monitoredBarrier after {timeout_s * 1000:.0f} ms."
    missing = f"Ranks {', '.join(map(str, late))}" if wait_all_ranks else f"Rank {late[0]}"
    return f"{missing} failed to pass monitoredBarrier in {timeout_s * 1000:.0f} ms"
