"""Environment variables and the defaults that mpisgd sets for MPI; loads neither MPI nor torch."""

import contextlib
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpisgd.errors import InvalidArgument

__all__ = [
    "BUILT_IN_PROFILE",
    "ENDED_NOTE",
    "GPU_CHOICES",
    "JOINED_NOTE",
    "JOINER_VARIABLE",
    "LEFT_NOTE",
    "NOTES_VARIABLE",
    "PREEMPTED",
    "PREEMPTED_NOTE",
    "VARIABLES",
    "Variable",
    "cache_folder",
    "check",
    "check_staging",
    "cross_memory",
    "default_threads",
    "fault_tolerance",
    "gpu",
    "huge_pages",
    "is_launched",
    "keep_memory",
    "launcher_local_size",
    "launcher_rank",
    "launcher_size",
    "note",
    "profile",
    "shared_memory",
    "stall_warning_s",
    "starts_alone",
    "step_limit",
    "step_log",
    "timeline",
    "timeout_s",
    "was_spawned",
]

# Rank and sizes as launchers export them: Open MPI, then the PMI of MPICH and Intel MPI, then Slurm's srun.
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
# Slurm sets its variables in a batch script too, which is no rank; this one only in a step.
SLURM_STEP_VARIABLE = "SLURM_STEP_NUM_TASKS"
# Of a step, for example "2(x3),1": the ranks of each node in turn.
SLURM_TASKS_VARIABLE = "SLURM_STEP_TASKS_PER_NODE"
# The step's number comes first: salloc's shell is a step of one task and also sees that of the allocation.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", SLURM_STEP_VARIABLE, "SLURM_NTASKS")

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
DEFAULT_TIMEOUT_S = 1800.0
LONGEST_TIMEOUT_S = 9e9  # about as long as Python can wait for a lock (threading.TIMEOUT_MAX)
DEFAULT_STALL_WARNING_S = 60.0
BUILT_IN_PROFILE = "built-in"
BACKEND = "mpisgd"  # of torch.distributed
GPU_CHOICES = ("auto", "nccl", "mpi")
# The exit code of a preempted job that has saved its state, as in HTCondor's manual. Python, mpirun and the
# shell use none like it (143 is any process that SIGTERM has killed).
PREEMPTED = 85
NOTES_VARIABLE = "MPISGD_RUN_NOTES"
JOINER_VARIABLE = "MPISGD_ELASTIC_NEWCOMER"
TO_JOIN, JOINED = "1", "0"  # its values; child processes inherit them
LOOPBACK = "127.0.0.1"
LAST_PORT = 2**16 - 1
ENDED_NOTE = "ended 0"  # of the program, whatever mpirun returns
# Of the first rank of mpirun's host: it is in the job, and has left it in order; and of any rank that leaves
# because of a signal.
JOINED_NOTE, LEFT_NOTE, PREEMPTED_NOTE = "joined", "left", "preempted"


class Endpoint(NamedTuple):
    """Where metrics are served.

    Attributes:
        port: of each host; 0: one that is free; None: nothing is served, only measured.
        address: of the host, at which it listens.
    """

    port: int | None
    address: str = LOOPBACK


class Variable(NamedTuple):
    """An environment variable that a user may set, as the environment reference shows it.

    Attributes:
        name: of the variable.
        default: what holds without it.
        meaning: what it sets.
    """

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable("MPISGD_TIMEOUT_S", "1800", "timeout of any operation, in seconds"),
    Variable("MPISGD_STALL_WARNING_S", "60", "seconds of waiting until a stall report; 0: never"),
    Variable("MPISGD_SHARED_MEMORY", "1", "0: use MPI between the ranks of a host, too"),
    Variable("MPISGD_RANKS_PER_HOST", "0", "ranks that count as those of one host; 0: all that are there"),
    Variable("MPISGD_CROSS_MEMORY", "1", "0: no cross-memory attach, so no `all_reduce` by `direct`"),
    Variable(
        "MPISGD_FULL_TRACEBACK", "0", "1: errors show mpisgd's own lines and all arguments of operations"
    ),
    Variable("MPISGD_CHECK_STAGING", "0", "1: assert that operations write nothing too early; slow"),
    Variable("MPISGD_KEEP_MEMORY", "1", "0: leave glibc's allocator alone"),
    Variable("MPISGD_GPU", "auto", "transport of GPU tensors: `auto`, `nccl` or `mpi`"),
    Variable("MPISGD_PROFILE", "the cache folder's", "measured costs for `auto`: a file, or `built-in`"),
    Variable("MPISGD_TIMELINE", "none", "file for a timeline of all ranks"),
    Variable("MPISGD_METRICS_PORT", "none", "port at which each host serves metrics for Prometheus"),
    Variable("MPISGD_METRICS_ADDRESS", LOOPBACK, "address of that port; `0.0.0.0`: all of the host"),
    Variable("MPISGD_STEP_LOG", "none", "file to which rank 0 appends the time of each optimizer step"),
    Variable("MPISGD_STEP_LIMIT", "0", "the program ends after so many steps of an optimizer; 0: never"),
    Variable("MPISGD_STALL_STACKS", "0", "1: stall reports of `mpisgd.horovod` include stacks"),
    Variable("MPISGD_RESTART_COUNT", "none", "set by `python -m mpisgd run`: the number of restarts so far"),
    Variable("HOROVOD_FUSION_THRESHOLD", "67108864", "largest fusion buffer, in bytes; 0: no fusion"),
    Variable("HOROVOD_CYCLE_TIME", "2", "how long a submitted operation waits for more to fuse with, in ms"),
    Variable("HOROVOD_CACHE_CAPACITY", "1024", "operations that are negotiated by a bit once they have run"),
    Variable("HOROVOD_STALL_CHECK_TIME_SECONDS", "60", "seconds until the report of missing ranks"),
    Variable("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0", "seconds until the job ends; 0: never"),
    Variable("HOROVOD_STALL_CHECK_DISABLE", "0", "1: no report and no end of the job"),
    Variable("HOROVOD_TIMELINE", "none", "as `MPISGD_TIMELINE`; `DYNAMIC` is accepted"),
    Variable("HOROVOD_TIMELINE_MARK_CYCLES", "0", "1: mark each cycle of the negotiation in the timeline"),
    Variable("OMP_NUM_THREADS", "none", "if set, mpisgd does not set torch's threads"),
    Variable("MKL_NUM_THREADS", "none", "as `OMP_NUM_THREADS`"),
    Variable("OPENBLAS_NUM_THREADS", "none", "as `OMP_NUM_THREADS`"),
    Variable("OMPI_MCA_*", "none", "settings of Open MPI; mpisgd does not override them"),
    Variable("XDG_CACHE_HOME", "~/.cache", "its folder `mpisgd` holds the profiles of `tune`"),
)


def _first_int(names: tuple[str, ...], env: Mapping[str, str]) -> int | None:
    for name in names:
        if name.startswith("SLURM_") and SLURM_STEP_VARIABLE not in env:
            continue
        value = env.get(name, "")
        if value.isdigit():
            return int(value)
    return None


def launcher_rank(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank of this process, None without a launcher."""
    return _first_int(RANK_VARIABLES, env)


def launcher_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that the launcher started, None without one."""
    return _first_int(SIZE_VARIABLES, env)


def is_launched(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether `mpirun` has started this process, or `srun` with several tasks."""
    by_mpirun = _first_int(("OMPI_COMM_WORLD_RANK", "PMI_RANK"), env) is not None
    return by_mpirun or (_first_int((SLURM_STEP_VARIABLE,), env) or 1) > 1


def starts_alone(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the only rank and not a joiner."""
    return (launcher_size(env) or 1) == 1 and not was_spawned(env)


def was_spawned(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a joiner: ranks of a job have spawned it."""
    return JOINER_VARIABLE in env


def waits_to_join(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a joiner that has not joined its job yet."""
    return env.get(JOINER_VARIABLE) == TO_JOIN


def launcher_local_size(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks on this host, None if the launcher does not export it."""
    found = _first_int(LOCAL_SIZE_VARIABLES, env)
    return _slurm_local_size(env) if found is None else found


def _slurm_local_size(env: Mapping[str, str]) -> int | None:
    """Return the ranks of a Slurm step on this node, of which others may have more or less."""
    node = _first_int(("SLURM_NODEID",), env)
    runs = [
        re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", run) for run in env.get(SLURM_TASKS_VARIABLE, "").split(",")
    ]
    tasks = [int(run[1]) for run in runs if run for _ in range(int(run[2] or 1))]
    if node is not None and all(runs) and node < len(tasks):
        return tasks[node]
    return _first_int(("SLURM_NTASKS_PER_NODE",), env)


def torchrun_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that torchrun would set for this process; empty without an MPI launcher."""
    if _first_int(("OMPI_COMM_WORLD_RANK", "PMI_RANK"), env) is None and SLURM_STEP_VARIABLE not in env:
        return {}
    found = {
        "RANK": launcher_rank(env),
        "WORLD_SIZE": launcher_size(env),
        "LOCAL_RANK": _first_int(LOCAL_RANK_VARIABLES, env),
        "LOCAL_WORLD_SIZE": launcher_local_size(env),
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def torchrun_rank(env: Mapping[str, str] = os.environ) -> tuple[int | None, int | None]:
    """Return RANK and WORLD_SIZE, each None where it is not set."""
    return _first_int(("RANK",), env), _first_int(("WORLD_SIZE",), env)


def timeout_s(env: Mapping[str, str] = os.environ) -> float:
    """Return how long to wait for other ranks, in seconds (MPISGD_TIMEOUT_S, default 1800)."""
    return _seconds("MPISGD_TIMEOUT_S", DEFAULT_TIMEOUT_S, env, longest_s=LONGEST_TIMEOUT_S)


def stall_warning_s(env: Mapping[str, str] = os.environ) -> float:
    """Return after how long a wait is reported, in seconds (MPISGD_STALL_WARNING_S, default 60, 0: never)."""
    return _seconds("MPISGD_STALL_WARNING_S", DEFAULT_STALL_WARNING_S, env, zero_is_never=True)


def _seconds(
    name: str,
    default: float,
    env: Mapping[str, str],
    *,
    zero_is_never: bool = False,
    longest_s: float = math.inf,
) -> float:
    """Return a variable's value in seconds, or raise InvalidArgument."""
    text = env.get(name, str(default))
    with contextlib.suppress(ValueError):
        value = float(text)
        if 0 < value <= longest_s or (value == 0 and zero_is_never):
            return value
    expected = "a number of seconds, 0 for never" if zero_is_never else "a positive number of seconds"
    if longest_s < math.inf:
        expected = f"a positive, finite number of seconds, {longest_s:.0e} at most"
    raise InvalidArgument(f"{name}={text!r}: expected {expected}")


def check(env: Mapping[str, str] = os.environ) -> None:
    """Raise InvalidArgument if a setting is invalid."""
    stall_warning_s(env)
    shared_memory(env)
    cross_memory(env)
    check_staging(env)
    keep_memory(env)
    step_limit(env)
    ranks_per_host(env)
    metrics(env)


def shared_memory(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether ranks of a host may use shared memory (MPISGD_SHARED_MEMORY, default 1)."""
    return _switch("MPISGD_SHARED_MEMORY", env)


def cross_memory(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether ranks of a host may use cross-memory attach (MPISGD_CROSS_MEMORY, default 1)."""
    return _switch("MPISGD_CROSS_MEMORY", env)


def full_traceback(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether errors show the package's own lines, too (MPISGD_FULL_TRACEBACK, default 0)."""
    return _switch("MPISGD_FULL_TRACEBACK", env, "0")


def check_staging(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether to assert that operations write nothing too early (MPISGD_CHECK_STAGING, default 0)."""
    return _switch("MPISGD_CHECK_STAGING", env, "0")


def ranks_per_host(env: Mapping[str, str] = os.environ) -> int:
    """Return how many ranks count as those of one host (MPISGD_RANKS_PER_HOST, default 0: all that are).

    For tests: neighbouring ranks of one machine then communicate as those of several hosts do.
    """
    text = env.get("MPISGD_RANKS_PER_HOST") or "0"
    if not text.isdigit():
        raise InvalidArgument(f"MPISGD_RANKS_PER_HOST={text!r}: expected a number of ranks")
    return int(text)


def keep_memory(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the C library keeps the memory that is freed (MPISGD_KEEP_MEMORY, default 1)."""
    return _switch("MPISGD_KEEP_MEMORY", env)


def huge_pages(env: Mapping[str, str] = os.environ, setting: Path = HUGE_PAGES) -> bool:
    """Return whether large tensors use huge pages: always, or on request of torch or glibc."""
    try:
        chosen = setting.read_text()
    except OSError:
        return False
    asked = env.get("THP_MEM_ALLOC_ENABLE") == "1" or "malloc.hugetlb=1" in env.get("GLIBC_TUNABLES", "")
    return "[always]" in chosen or ("[madvise]" in chosen and asked)


def _switch(name: str, env: Mapping[str, str], default: str = "1") -> bool:
    """Return a setting that is "0" or "1"."""
    text = env.get(name, default)
    if text not in ("0", "1"):
        raise InvalidArgument(f"{name}={text!r}: expected 0 or 1")
    return text == "1"


def gpu(env: Mapping[str, str] = os.environ) -> str:
    """Return the transport of GPU tensors, MPISGD_GPU: auto (the default), nccl or mpi; see `mpisgd.init`."""
    text = env.get("MPISGD_GPU") or "auto"
    if text not in GPU_CHOICES:
        raise InvalidArgument(f"MPISGD_GPU={text!r}: expected one of {', '.join(GPU_CHOICES)}")
    return text


def profile(env: Mapping[str, str] = os.environ) -> str | None:
    """Return MPISGD_PROFILE: a file of measured costs, or BUILT_IN_PROFILE; None for the cache folder."""
    return env.get("MPISGD_PROFILE") or None


def timeline(env: Mapping[str, str] = os.environ) -> str | None:
    """Return MPISGD_TIMELINE: the file of the timeline; see `mpisgd.start_timeline`."""
    return env.get("MPISGD_TIMELINE") or None


def metrics(env: Mapping[str, str] = os.environ) -> Endpoint | None:
    """Return where metrics are served (MPISGD_METRICS_PORT, MPISGD_METRICS_ADDRESS), None for nowhere.

    A joiner has what the job has that it joins.
    """
    text = env.get("MPISGD_METRICS_PORT")
    if not text or was_spawned(env):
        return None
    if not (text.isascii() and text.isdigit() and int(text) <= LAST_PORT):
        raise InvalidArgument(f"MPISGD_METRICS_PORT={text!r}: expected a port, 0 to {LAST_PORT}")
    return Endpoint(int(text), env.get("MPISGD_METRICS_ADDRESS") or LOOPBACK)


def step_log(env: Mapping[str, str] = os.environ) -> Path | None:
    """Return MPISGD_STEP_LOG: the file for the times of training steps; see `mpisgd.job.step_log`."""
    text = env.get("MPISGD_STEP_LOG")
    return Path(text) if text else None


def step_limit(env: Mapping[str, str] = os.environ) -> int:
    """Return after how many steps of an optimizer the program ends (MPISGD_STEP_LIMIT, default 0: never)."""
    text = env.get("MPISGD_STEP_LIMIT") or "0"
    if not text.isdigit():
        raise InvalidArgument(f"MPISGD_STEP_LIMIT={text!r}: expected a number of steps, 0 for no limit")
    return int(text)


def fault_tolerance(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI runs with fault tolerance (`mpirun --with-ft ulfm`)."""
    return env.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "ulfm", "mpi")


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for measurements of this machine."""
    return Path(env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "mpisgd"


def default_threads(current: int, local_size: int, cores: int, env: Mapping[str, str] = os.environ) -> int:
    """Return the number of torch's threads: the host's cores divided by its ranks.

    Never more than `current`, which also stays if the environment sets a number of threads.
    """
    if any(name in env for name in THREAD_VARIABLES):
        return current
    return min(current, max(1, cores // local_size))


def note(line: str, env: Mapping[str, str] = os.environ) -> None:
    """Append a line to the notes of `python -m mpisgd run`, if it has started this job on this host."""
    path = env.get(NOTES_VARIABLE)
    if path:
        with contextlib.suppress(OSError):  # another host has no such file
            # Another user may have put something else under the name, once `run` has ended or elsewhere.
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "a") as file:
                status = os.fstat(fd)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                    file.write(line + "\n")
