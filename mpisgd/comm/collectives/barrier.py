"""`barrier`."""

from mpisgd.comm.arguments import check_positive
from mpisgd.comm.group import Group
from mpisgd.comm.handshake import Operation
from mpisgd.comm.job import group_or_world
from mpisgd.comm.work import Work

__all__ = ["barrier"]


def barrier(
    group: Group | None = None, async_op: bool = False, *, timeout_s: float | None = None
) -> Work | None:
    """Return once every rank of the group has called it. The agreement on it is the barrier itself.

    Args:
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`.
        timeout_s: how long to wait for the others, instead of the group's limit.

    Raises:
        CollectiveTimeout: names the ranks that did not come; the group cannot be used again.
        InvalidArgument: `timeout_s` is not positive.
    """
    lane = group_or_world(group).lane
    if timeout_s is not None:
        check_positive("barrier", "timeout_s", timeout_s)
    return lane.run(Operation("barrier"), lambda: None, async_op=async_op, timeout_s=timeout_s)
