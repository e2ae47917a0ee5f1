"""`barrier`."""

from functools import partial

from mpisgd.arguments import check_timeout
from mpisgd.collectives.dispatch import KnownCall, remember
from mpisgd.collectives.uneven import beside_ranks_without_data
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.submission import RepeatedOperation
from mpisgd.core.uneven_data import UnevenData, performs
from mpisgd.core.work import Work
from mpisgd.job.lifecycle import group_or_world

__all__ = ["barrier"]

NAME = "barrier"
OPERATION = Operation(NAME)


def barrier(
    group: Group | None = None, async_op: bool = False, *, timeout_s: float | None = None
) -> Work | None:
    """Wait until every rank of the group has called it.

    Args:
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`.
        timeout_s: how long to wait for the others, instead of the group's timeout.

    Raises:
        CollectiveTimeout: names the ranks that did not come; the group cannot be used again.
        InvalidArgument: `timeout_s` is not positive, or infinite.
    """
    group = group_or_world(group)
    if timeout_s is not None:
        check_timeout(NAME, "timeout_s", timeout_s)
    elif async_op is False:
        if (known := group.known_calls.get(NAME)) is None:
            known = KnownCall(OPERATION, partial(group.queue.run_again, RepeatedOperation(OPERATION)))
            remember(group, NAME, known)
        if known.run_again(None):
            return None
    queue = group.queue
    with beside_ranks_without_data(group, NAME):
        return queue.run(OPERATION, lambda: None, async_op=async_op, timeout_s=timeout_s)


@performs(NAME)
def _beside_others(data: UnevenData, ranks: tuple[int, ...], ordinal: int) -> None:
    """Call it on a rank without data."""
    barrier(data.group_like(ranks, ordinal))
