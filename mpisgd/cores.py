"""Which cores a job may use on this host."""

import contextlib
import math
import os
from pathlib import Path

__all__ = ["available_cores", "cores_of_job"]


def available_cores() -> int:
    """Return how many cores the job may use on this host; a container's CPU quota is an upper bound."""
    return max(1, min(len(cores_of_job()), _quota_cores()))


def cores_of_job() -> set[int]:
    """Return the cores of the job on this host.

    `mpirun` may have bound this process to one core, so the affinity of its parent (mpirun, or its daemon on
    this host) counts too: it has the cores of the batch system.
    """
    cores = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):  # no such parent, or no permission
        cores |= os.sched_getaffinity(os.getppid())
    return cores


def _quota_cores() -> int:
    """Return the cores of a cgroup's CPU quota, rounded up; a very large number without a quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        return 1 << 20
