"""What the environment says, and the defaults mpisgd gives MPI: look-ups that need no MPI and no torch."""

import contextlib
import math
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from mpisgd.errors import InvalidArgument

__all__ = [
    "available_cores",
    "default_threads",
    "launcher_local_size",
    "launcher_rank",
    "launcher_size",
    "mpi_defaults",
    "set_mpi_defaults",
    "shared_memory",
    "timeout_s",
]

# Each launcher tells its processes who they are before MPI starts: Open MPI, then the PMI of MPICH and
# Intel MPI, then Slurm's own srun.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

DEFAULT_TIMEOUT_S = 1800.0


def _first_int(names: tuple[str, ...], env: Mapping[str, str]) -> int | None:
    for name in names:
        value = env.get(name, "")
        if value.isdigit():
            return int(value)
    return None


def launcher_rank(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank `mpirun` gave this process, None where no launcher is to be seen."""
    return _first_int(RANK_VARIABLES, env)


def launcher_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks `mpirun` started, None where no launcher is to be seen."""
    return _first_int(SIZE_VARIABLES, env)


def launcher_local_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Return how many of the ranks share this host, None where the launcher does not say."""
    return _first_int(LOCAL_SIZE_VARIABLES, env)


def timeout_s(env: Mapping[str, str] = os.environ) -> float:
    """Return how long to wait for other ranks, in seconds (MPISGD_TIMEOUT_S, default 1800)."""
    text = env.get("MPISGD_TIMEOUT_S")
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise InvalidArgument(f"MPISGD_TIMEOUT_S={text!r}: expected a positive number of seconds")
    return value


def shared_memory(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether ranks of a host may use shared memory (MPISGD_SHARED_MEMORY, default 1)."""
    text = env.get("MPISGD_SHARED_MEMORY", "1")
    if text not in ("0", "1"):
        raise InvalidArgument(f"MPISGD_SHARED_MEMORY={text!r}: expected 0 or 1")
    return text == "1"


def available_cores() -> int:
    """Return how many cores the job may use on this host.

    `mpirun` may have bound this process to one core, so its parent (mpirun, or the daemon that started
    the ranks here) is asked too: it holds what the batch system gave. A container's CPU quota caps it.
    """
    cores = set(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):  # the parent is gone, or not ours to ask
        cores |= os.sched_getaffinity(os.getppid())
    return max(1, min(len(cores), _quota_cores()))


def _quota_cores() -> int:
    """Return the cores that a cgroup's CPU quota amounts to, rounded up; very many without a quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2 here, or "max"
        return 1 << 20


def mpi_defaults(
    env: Mapping[str, str] = os.environ, *, cores: int | None = None, local_size: int | None = None
) -> dict[str, str]:
    """Return the MPI settings mpisgd wants and the user has not chosen; they must be set before MPI starts.

    - More ranks than cores on a host: a waiting rank must give up its core. Open MPI's default of
      spinning made an all-reduce 15 times slower there.
    - One-sided windows must not be tried over UCX: every window would print an error line.
    """
    cores = available_cores() if cores is None else cores
    local_size = launcher_local_size(env) if local_size is None else local_size
    wanted = {"OMPI_MCA_osc": "^ucx"}
    if local_size is not None and local_size > cores:
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in wanted.items() if name not in env}


def set_mpi_defaults(env: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Put `mpi_defaults` into the environment; return what was set."""
    defaults = mpi_defaults(env)
    env.update(defaults)
    return defaults


def default_threads(current: int, local_size: int, cores: int, env: Mapping[str, str] = os.environ) -> int:
    """Return how many threads torch should use: the host's cores shared by its ranks.

    Never more than `current`, and never against the user: a thread count in the environment stands.
    """
    if any(name in env for name in THREAD_VARIABLES):
        return current
    return min(current, max(1, cores // local_size))
