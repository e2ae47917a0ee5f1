"""The job's world: its start and its end."""

import atexit
import itertools
import os
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpisgd import config, tracing
from mpisgd.accelerator.runtime import runtime
from mpisgd.core import waiting
from mpisgd.core.group import Group
from mpisgd.core.topology import Topology, discover
from mpisgd.core.waiting import set_oversubscribed
from mpisgd.errors import (
    AlreadyInitialized,
    InvalidArgument,
    MpisgdError,
    PeerLost,
)
from mpisgd.job.excepthook import ExceptHook
from mpisgd.job.forced_exit import exit_after_loss, exit_without_host
from mpisgd.job.mpi_settings import mpi_defaults, set_mpi_defaults
from mpisgd.job.quiesce import end_operations
from mpisgd.job.stale_files import leave_nothing
from mpisgd.job.startup import (
    check_arguments,
    end_where_mpi_failed,
    load_mpi,
    mpi_is_running,
    refuse_in_child,
    refuse_to_be_alone,
    say_what_came_too_late,
    share_threads,
)
from mpisgd.monitor import heartbeat
from mpisgd.monitor.console import ConsoleLock, print_to_user
from mpisgd.monitor.stall_monitor import StallMonitor
from mpisgd.monitor.startup_timeout import set_alarm, within
from mpisgd.transport.device.selection import agree_on_wanted
from mpisgd.tuning.profile import find_costs

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI

    from mpisgd.monitor.failure_detector import FailureDetector
    from mpisgd.transport.mpi import Communicator

__all__ = [
    "begin",
    "current_job",
    "give_up",
    "group_or_world",
    "init",
    "is_initialized",
    "let_go",
    "parent_wire",
    "revoke_all",
    "shutdown",
    "world",
]


@dataclass
class Job:
    """What `init()` has set up.

    `wire`: the ranks, by the communicator that all else was made of. `console`: held while one of the host's
    ranks prints. `monitor`: tells what the other ranks are doing. `at_end`: called by all ranks in
    `shutdown()`, once nothing is under way any more. `failure_detector`: notices the loss of a rank, where
    the job outlives that. `lost_ranks`: ranks were lost before this world was made. `lost_host`: a host was
    lost, and MPI's own end would wait for it.
    """

    comm: "MPI.Intracomm | None"
    wire: "Communicator"
    world: Group
    hooks: ExceptHook
    timeout_s: float
    threads_allowed: bool
    gpu: str
    console: ConsoleLock
    monitor: StallMonitor
    groups: list[Group] = field(default_factory=list)
    names: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    at_end: "list[Callable[[], None]]" = field(default_factory=list)
    failure_detector: "FailureDetector | None" = None
    lost_ranks: bool = False
    lost_host: bool = False


_job: Job | None = None
_left: Job | None = None  # by `shutdown()`
_exit_registered = False


def init(
    comm: "MPI.Intracomm | None" = None,
    *,
    timeout_s: float | None = None,
    num_threads: int | None = None,
    gpu: str | None = None,
) -> None:
    """Start MPI (unless it runs) and make the job's world out of `comm`.

    Collective over `comm`. Without `mpirun` the world is this process alone. A second call does nothing;
    the first use of anything that needs the world calls it too. What it sets, and only where the user has
    set nothing: waiting ranks yield when there are more ranks than cores, no one-sided communication over
    UCX, no search for a network that is not there, torch's threads = cores / ranks on this host, and the
    current GPU = local rank, counted round. An exception that nobody catches ends the whole job from then on,
    with one traceback.

    Args:
        comm: an mpi4py communicator of the ranks that take part, duplicated; default MPI.COMM_WORLD.
        timeout_s: how long any operation waits for other ranks; default MPISGD_TIMEOUT_S, else 1800 s.
        num_threads: torch threads on this rank, instead of the default above.
        gpu: how tensors on GPUs travel, the same on all ranks: `auto`, by NCCL where every rank of a group
            has a GPU of its own, else through host memory, with a warning; `nccl`, or an error; `mpi`, by a
            CUDA-aware MPI where this one is, else through host memory. Default MPISGD_GPU, else auto.

    Raises:
        AlreadyInitialized: called before with another communicator or another `gpu`.
        MpiNotFound: there is no MPI library.
        JobError: the launcher has started several ranks, of which this MPI knows nothing.
        NotInitialized: this is a child of a rank, such as a DataLoader's worker, which cannot be a rank.
        InvalidArgument: `comm` is no communicator, `timeout_s` or `num_threads` is not positive,
            MPISGD_PROFILE names no file, or the ranks give different `gpu`.
    """
    check_arguments(comm, timeout_s, num_threads, gpu)
    if _job is not None:
        _check_same(comm, gpu)
        return
    refuse_in_child()
    limit_s = timeout_s if timeout_s is not None else config.timeout_s()
    config.check()  # what is wrong should be known before MPI starts
    with within(limit_s, "mpisgd.init()"):
        try:
            _start(comm, num_threads, limit_s, gpu or config.gpu())
        except RuntimeError as exc:
            end_where_mpi_failed(exc)
            raise


def _start(comm: "MPI.Intracomm | None", num_threads: int | None, limit_s: float, wanted_gpu: str) -> None:
    """Do what `init` says."""
    global _exit_registered
    was_running, defaults = mpi_is_running(), mpi_defaults()
    if not was_running:
        defaults = set_mpi_defaults()
    mpi = load_mpi()
    mpi.start()
    if comm is None:
        refuse_to_be_alone(mpi.MPI.COMM_WORLD.Get_size(), mpi.library_version().partition(",")[0])
    if heartbeat.is_enabled() and mpi.thread_level() == "MULTIPLE":
        heartbeat.start(mpi.progress)
    wire = mpi.Communicator((comm or mpi.MPI.COMM_WORLD).Dup())
    wishes = wire.all_gather_object((wanted_gpu, config.timeline()))
    wanted_gpu = agree_on_wanted([gpu for gpu, _ in wishes])
    complaint = begin(wire, comm, limit_s, wanted_gpu)
    assert _job is not None
    leave_nothing(wire)
    share_threads(wire, _job.world.topology, num_threads)
    runtime().take_device(_job.world.topology.local_rank)
    if was_running:
        say_what_came_too_late(mpi.library_version(), defaults, wire.rank)
    if (path := next((path for _, path in wishes if path), None)) is not None:
        tracing.start_recorder(path, wire)  # by the first rank's wish: not every launcher hands it to all
    if complaint:
        warnings.warn(complaint, RuntimeWarning, stacklevel=3)
    if not _exit_registered:
        atexit.register(_leave)
        _exit_registered = True


def begin(wire: "Communicator", comm: "MPI.Intracomm | None", timeout_s: float, gpu: str) -> str:
    """Make the job's world of the ranks of `wire`, which it owns from now on; return a complaint or "".

    Collective.
    """
    global _job
    mpi = load_mpi()
    multiple = mpi.thread_level() == "MULTIPLE"
    detects = multiple and wire.size > 1 and mpi.survives_losses()
    detector = _start_failure_detector(wire) if detects else None
    try:
        here = discover(wire)
        costs, complaint = find_costs(wire, here.ranks_per_host)
        group = Group(
            "world", range(wire.size), wire, timeout_s=timeout_s, threads=multiple, topology=here, costs=costs
        )
        console = ConsoleLock(wire)
        hooks = ExceptHook(wire, group.topology, console)
        monitor = _start_monitor(wire, here, console, timeout_s, threads_allowed=multiple)
        monitor.watchdog.abort = lambda reason: _end_without_python(hooks, multiple)
        if detector is not None:
            processes = [monitor.collector.processes[rank] for rank in here.nodes[here.node_rank]]
            detector.enable_abort(processes, here.local_rank)
            hooks.abort, monitor.watchdog.revoke = detector.abort, detector.revoke
    except BaseException:
        if detector is not None:
            detector.stop()
        raise
    _job = Job(
        comm,
        wire,
        group,
        hooks,
        timeout_s,
        multiple,
        gpu,
        console,
        monitor,
        [group],
        failure_detector=detector,
    )
    hooks.install()
    set_oversubscribed(here.local_size > config.available_cores())
    return complaint or ""


def _start_monitor(
    wire: "Communicator", here: Topology, console: ConsoleLock, timeout_s: float, *, threads_allowed: bool
) -> StallMonitor:
    """Let this rank be asked what it does, and ask; collective."""
    return StallMonitor(
        wire,
        here,
        _own_groups,
        console,
        threads_allowed=threads_allowed,
        timeout_s=timeout_s,
        warning_s=config.stall_warning_s(),
        say=print_to_user,
    )


def _start_failure_detector(wire: "Communicator") -> "FailureDetector":
    from mpisgd.monitor.failure_detector import FailureDetector  # it starts MPI

    return FailureDetector(wire)


def give_up(reason: str) -> Job:
    """Leave the world without meeting anyone, since a rank of it was lost; return what it was.

    Its groups cannot be used any more: they raise `PeerLost`. Its failure detector still sees when the job
    is aborted.
    """
    global _job
    job = current_job()
    if job.failure_detector is not None:
        job.failure_detector.retire()
    waiting.cancel_all(PeerLost(reason))
    revoke_all()
    job.monitor.close()
    for group in job.groups:
        group.give_up(reason)
    job.console.close()
    job.hooks.remove()
    tracing.abandon()
    _job = None
    return job


def revoke_all() -> None:
    """End whatever goes on between the ranks; see `mpisgd.transport.mpi`."""
    load_mpi().revoke_all()


def let_go() -> None:
    """Free the memory of what was given up and is over; see `mpisgd.transport.mpi`."""
    load_mpi().free_abandoned()


def parent_wire() -> "Communicator | None":
    """Return the way to the ranks that have spawned this process; None where `mpirun` has started it."""
    wire: Communicator | None = load_mpi().parent()
    return wire


def _check_same(comm: "MPI.Intracomm | None", gpu: str | None) -> None:
    assert _job is not None
    if gpu is not None and gpu != _job.gpu:
        raise AlreadyInitialized(f"init: gpu={gpu!r}, but it was called before and chose {_job.gpu!r}")
    if comm is not None and comm != _job.comm:
        raise AlreadyInitialized("init: called before with another communicator; call shutdown() in between")


def _own_groups() -> list[Group]:
    """Return the groups that this rank is a member of."""
    return [] if _job is None else [group for group in list(_job.groups) if group.is_open]


def _end_without_python(hooks: ExceptHook, threads_allowed: bool) -> None:
    """End the job while the main thread is blocked inside MPI. Does not return."""
    tracing.flush()
    if threads_allowed:
        hooks.abort(1)
    os._exit(1)  # the launcher ends the others when it sees that


def is_initialized() -> bool:
    """Return whether the job's world exists."""
    return _job is not None


def current_job() -> Job:
    """Return what `init()` has set up; calls it if need be."""
    if _job is None:
        init()
    assert _job is not None
    return _job


def world() -> Group:
    """Return the group of all ranks of the job; calls `init()` if need be."""
    return current_job().world


def group_or_world(group: Group | None) -> Group:
    """Return `group`, or the world for None."""
    if group is None:
        return world()
    if not isinstance(group, Group):
        raise InvalidArgument(
            f"group is a {type(group).__name__}; expected one of mpisgd.new_group()'s, or None for all ranks"
        )
    return group


def shutdown() -> None:
    """Leave the job's world: let queued operations end, see that all ranks leave too, free everything.

    Collective. Called at the end of the program by itself. MPI goes on until the process ends, and
    `init()` may be called again.

    Raises:
        CollectiveMismatch: another rank is not leaving but in the middle of an operation.
        CollectiveTimeout: another rank did not come, now or at an earlier operation.
    """
    global _job, _left
    job = _job
    if job is None:
        return
    members = [group for group in job.groups if group.rank >= 0]
    try:
        ended = end_operations(members, job.timeout_s)
    except MpisgdError as exc:
        for group in members:  # nothing can be used any more; the end of the process ends the job
            group.queue.broken = group.queue.broken or exc
        raise
    for last_act in job.at_end:
        last_act()
    if job.failure_detector is not None:
        job.failure_detector.stop()
    job.monitor.close()
    with within(job.timeout_s, "mpisgd.shutdown()"):
        job.monitor.free()
        if job.failure_detector is not None:
            job.failure_detector.free()
        for group in reversed(members):
            group.close() if group in ended else group.leave()
    job.console.close()
    job.hooks.remove()
    _job, _left = None, job


def _leave() -> None:
    """At the end of the process: a clean exit if all ranks are leaving, the end of the job otherwise."""
    job = _job or _left
    if job is None or job.world.pid != os.getpid():
        return
    try:
        shutdown()  # unless the program has done so
    except MpisgdError as exc:  # MPI's own finalize would wait for ever for what is still under way
        job.hooks.fail(exc)
    heartbeat.stop()
    local_rank = job.world.known_topology.local_rank
    if job.lost_host:
        exit_without_host(local_rank)
    if job.lost_ranks:
        if local_rank == 0:
            config.note(config.ENDED_NOTE)  # `python -m mpisgd run` knows then that it has ended well
        exit_after_loss()
    elif job.world.size > 1:
        set_alarm(job.timeout_s)
