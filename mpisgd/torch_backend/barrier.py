"""`monitored_barrier`: torch's own refuses every backend but gloo by name."""

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from mpisgd.collectives.barrier import barrier
from mpisgd.errors import InvalidArgument
from mpisgd.torch_backend.process_group import ProcessGroupMpisgd

__all__ = ["monitored_barrier"]


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Return once every rank of the group has called it; name those that do not come.

    In place of `torch.distributed.monitored_barrier`, with its arguments. Every waiting rank raises and names
    all that are missing, so `wait_all_ranks` changes nothing.

    Args:
        group: a process group of this backend; default the default group.
        timeout: how long to wait; default the group's limit.
        wait_all_ranks: taken for compatibility.

    Raises:
        CollectiveTimeout: ranks did not come. The group cannot be used again.
        InvalidArgument: the group is of another backend.
    """
    group = group or distributed_c10d._get_default_group()
    if not isinstance(group, ProcessGroupMpisgd):
        raise InvalidArgument(f"monitored_barrier: the group is a {type(group).__name__}, not of 'mpisgd'")
    barrier(group.mpisgd_group, timeout_s=None if timeout is None else timeout.total_seconds())
