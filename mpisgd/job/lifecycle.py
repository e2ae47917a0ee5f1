"""The job's life: `init`, `begin` a world, `abandon` it after a loss, `shutdown`."""

import atexit
import functools
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from mpisgd import config, tracing
from mpisgd.accelerator.runtime import runtime
from mpisgd.arguments import texts_with_ranks
from mpisgd.core import consistency
from mpisgd.core.group import Group
from mpisgd.errors import AlreadyInitialized, InvalidArgument, MpisgdError, NotInitialized, PeerLost
from mpisgd.job.excepthook import shorten_tracebacks
from mpisgd.job.forced_exit import exit_after_loss, exit_without_host
from mpisgd.job.job_of_thread import PROCESS, job_place
from mpisgd.job.lazy_dynamo import defer_import
from mpisgd.job.malloc_settings import keep_freed_memory, return_freed_memory
from mpisgd.job.mpi_settings import mpi_defaults, set_mpi_defaults
from mpisgd.job.process_changes import changes, freeze_modules, publish_rank
from mpisgd.job.quiesce import end_operations
from mpisgd.job.stale_files import remove_stale_files
from mpisgd.job.startup import (
    abort_if_mpi_failed,
    check_init_arguments,
    check_is_no_child,
    check_world_size,
    load_mpi,
    share_threads,
    warn_of_late_defaults,
)
from mpisgd.job.startup_timeout import set_alarm, within
from mpisgd.job.step_log import start_step_log
from mpisgd.job.world import Job, make_job
from mpisgd.monitor import heartbeat
from mpisgd.monitor.step_counter import start_counting
from mpisgd.standard_error import print_to_user
from mpisgd.threads import waiting
from mpisgd.transport.device.nccl_options import describe, disagreement
from mpisgd.transport.device.selection import agree_on_wanted

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpisgd.transport.mpi import Communicator

__all__ = [
    "abandon",
    "begin",
    "begin_next",
    "current_job",
    "group_or_world",
    "init",
    "is_initialized",
    "shutdown",
    "world",
]


def init(
    comm: "MPI.Intracomm | None" = None,
    *,
    timeout_s: float | None = None,
    num_threads: int | None = None,
    gpu: str | None = None,
    keep_memory: bool | None = None,
    pg_options: Any = None,
) -> None:
    """Start MPI, unless it runs already, and set up the world group of the job.

    Collective over `comm`. Without `mpirun` the world is this process alone. A second call does nothing, and
    functions that need the world call `init()` themselves. From then on an uncaught exception on a rank ends
    the whole job, with one traceback.

    `init()` sets defaults for what the user has not set: waiting ranks yield their core if there are more
    ranks than cores, MPI uses no UCX for one-sided communication and does not search for networks that do not
    exist, torch has cores / ranks threads on this host, and the current GPU is the local rank modulo the
    number of GPUs. torch's optimizers do not import `torch._dynamo` until something else does. Under a
    launcher, RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are set if they were not, and existing objects
    are exempt from garbage collection (`gc.freeze`). `shutdown()` undoes this, except for the settings of MPI
    and of the GPU.

    Args:
        comm: an mpi4py communicator of the ranks that take part, which is duplicated; default MPI.COMM_WORLD.
        timeout_s: how long any operation waits for other ranks; default MPISGD_TIMEOUT_S, else 1800 s.
        num_threads: torch threads on this rank, instead of the default above.
        gpu: the transport of tensors on GPUs, the same on all ranks. `auto`: NCCL if every rank of a group
            has its own GPU, else host memory, with a warning. `nccl`: NCCL, or an error. `mpi`: MPI if it is
            CUDA-aware, else host memory. Default MPISGD_GPU, else auto.
        keep_memory: whether the C library keeps freed memory for the next training step, until `shutdown()`;
            default MPISGD_KEEP_MEMORY, else True. Only with glibc, and only if the environment has no
            settings for its allocator. Tensors made before are not affected.
        pg_options: options of NCCL, a `torch.distributed.ProcessGroupNCCL.Options` as for torch's
            `init_process_group`, such as a high-priority stream or `config.max_ctas`; the same on all ranks.
            Default: torch's. NCCL itself also reads its NCCL_ variables.

    Raises:
        AlreadyInitialized: called before with another communicator or another `gpu`.
        MpiNotFound: there is no MPI library.
        JobError: the launcher has started several ranks, and this MPI library sees only one of them.
        NotInitialized: this process is a child of a rank, such as a DataLoader's worker; or the ranks are
            threads of one process, and the job of this thread has ended.
        InvalidArgument: `comm` is no communicator, `timeout_s` or `num_threads` is not positive,
            MPISGD_PROFILE names no file, or the ranks give different `gpu`. `pg_options` that are wrong or
            that differ are reported on every rank.
    """
    check_init_arguments(comm, timeout_s, num_threads, gpu, keep_memory)
    place = job_place()
    if (job := place.job) is not None:
        if gpu is not None and gpu != job.gpu:
            raise AlreadyInitialized(f"init: gpu={gpu!r}, but it was called before and chose {job.gpu!r}")
        if (wrong := describe(pg_options)[1]) != "":
            raise InvalidArgument(f"init: {wrong}")
        if pg_options is not None and describe(pg_options) != describe(job.pg_options):
            raise AlreadyInitialized("init: called before with other pg_options")
        if comm is not None and comm != job.comm:
            raise AlreadyInitialized(
                "init: called before with another communicator; call shutdown() in between"
            )
        return
    if place is not PROCESS:
        raise NotInitialized(
            "init: the job of this thread has ended; whoever started the thread starts a job"
        )
    check_is_no_child()
    limit_s = timeout_s if timeout_s is not None else config.timeout_s()
    config.check()  # what is wrong should be known before MPI starts
    keep_freed_memory(config.keep_memory() if keep_memory is None else keep_memory)
    defer_import()
    freeze_modules()  # before there is a world, which the collector must find when it is left after a loss
    try:
        with within(limit_s, "mpisgd.init()"):
            try:
                _start(comm, num_threads, limit_s, gpu or config.gpu(), pg_options)
            except RuntimeError as exc:
                abort_if_mpi_failed(exc)
                raise
    except BaseException:
        changes.close()  # no job's end will undo them
        shorten_tracebacks()
        raise


def _start(
    comm: "MPI.Intracomm | None", num_threads: int | None, limit_s: float, wanted_gpu: str, pg_options: Any
) -> None:
    """Do what `init` says."""
    loaded = sys.modules.get("mpi4py.MPI")  # looking does not start MPI
    was_running, defaults = loaded is not None and loaded.Is_initialized(), mpi_defaults()
    communicator = _start_mpi(comm, was_running)
    wishes = communicator.all_gather_object((wanted_gpu, config.timeline(), describe(pg_options)))
    if (error := disagreement("init", [options for _, _, options in wishes])) is not None:
        raise error
    job = _enter(make_job(communicator, comm, limit_s, agree_on_wanted([gpu for gpu, *_ in wishes])))
    job.pg_options = pg_options
    remove_stale_files(communicator)
    share_threads(communicator, job.world.topology, num_threads)
    runtime().take_device(job.world.topology.local_rank)
    if was_running:
        warn_of_late_defaults(load_mpi().library_version(), defaults, communicator.rank)
    # By the first rank's wish: not every launcher hands it to all.
    if (path := next((path for _, path, _ in wishes if path), None)) is not None:
        tracing.start_recorder(path, job.world)
    publish_rank()
    start_counting()
    start_step_log(communicator.rank, communicator.size)
    if job.metrics is not None:
        problems = communicator.all_gather_object(tracing.start_metrics(job))
        if text := texts_with_ranks(job.world.ranks, problems):
            raise InvalidArgument(text)
    if job.complaint:
        warnings.warn(job.complaint, RuntimeWarning, stacklevel=3)
    _register_exit()


def _start_mpi(comm: "MPI.Intracomm | None", was_running: bool) -> "Communicator":
    """Start MPI; return a duplicate of `comm`, or of MPI's world. Collective over it."""
    if not was_running:
        set_mpi_defaults()
    mpi = load_mpi()
    mpi.start()
    if comm is None:
        check_world_size(mpi.MPI.COMM_WORLD.Get_size(), mpi.library_version().partition(",")[0])
    if heartbeat.is_enabled() and mpi.thread_level() == "MULTIPLE":
        heartbeat.start(mpi.progress)
    communicator: Communicator = mpi.Communicator((comm or mpi.MPI.COMM_WORLD).Dup())
    return communicator


@functools.cache  # once
def _register_exit() -> None:
    atexit.register(_at_exit)
    if current_job().world.known_topology.local_rank == 0:
        config.note(config.JOINED_NOTE)  # tells `python -m mpisgd run` to expect the other note


def begin(communicator: "Communicator", comm: "MPI.Intracomm | None", timeout_s: float, gpu: str) -> Job:
    """Make the job's world of the ranks of `communicator`, which it owns from now on. Collective."""
    return _go_on_measuring(_enter(make_job(communicator, comm, timeout_s, gpu)))


def begin_next(old: Job, communicator: Any) -> Job:
    """Make the world that follows an abandoned one, of the ranks of `communicator`. Collective over these."""
    assert old.make_next is not None
    job = old.make_next(communicator)
    job.pg_options = old.pg_options
    return _go_on_measuring(_enter(job))


def _enter(job: Job) -> Job:
    if job.hooks is not None:
        job.hooks.install()
    job_place().job = job
    return job


def _go_on_measuring(job: Job) -> Job:
    """Serve metrics as the world before did; where that cannot be, training goes on without them."""
    if job.metrics is not None and (problem := tracing.start_metrics(job)):
        print_to_user(problem)
    return job


def abandon(reason: str) -> Job:
    """Leave the world since a rank of it was lost, without communicating; return what it was.

    Its groups cannot be used any more: they raise `PeerLost`. Its failure detector still sees when the job is
    aborted.
    """
    job = current_job()
    if job.failure_detector is not None:
        job.failure_detector.retire()
    waiting.cancel_all(PeerLost(reason))
    if job.fault_tolerance is not None:
        job.fault_tolerance.revoke_all()
    if job.monitor is not None:
        job.monitor.close()
    for group in job.groups:
        group.abandon(reason)
    job.groups.clear()
    _remove_hooks(job)
    tracing.abandon()
    job_place().job = None
    return job


def is_initialized() -> bool:
    """Return whether the job's world exists."""
    return job_place().job is not None


def current_job() -> Job:
    """Return the job that `init()` has set up; calls it if need be."""
    job = job_place().job
    if job is None:
        init()
        job = job_place().job
        assert job is not None
    return job


def world() -> Group:
    """Return the group of all ranks of the job; calls `init()` if need be."""
    return current_job().world


def group_or_world(group: Group | None) -> Group:
    """Return `group`, or the world for None."""
    if group is None:
        job = job_place().job
        return (job or current_job()).world
    if not isinstance(group, Group):
        raise InvalidArgument(
            f"group is a {type(group).__name__}; expected one of mpisgd.new_group()'s, or None for all ranks"
        )
    return group


def shutdown() -> None:
    """Leave the job: finish queued operations, wait for all ranks to leave, and free all resources.

    Collective. Called automatically at exit. MPI itself ends with the process, so `init()` may be called
    again. Freed memory that the C library has kept is returned to the system, and the changes of `init()` to
    the process are undone.

    Raises:
        CollectiveMismatch: another rank is in the middle of an operation and does not leave.
        CollectiveTimeout: another rank did not come, now or at an earlier operation.
    """
    place = job_place()
    if (job := place.job) is None:
        return
    if all(group.queue.broken is None for group in job.groups):
        for callback in list(job.before_end):
            callback()
    members = list(job.groups)
    try:
        ended = end_operations(members, job.timeout_s)
    except MpisgdError as exc:
        for group in members:  # none can be used any more; the exit of this process ends the job
            group.queue.broken = group.queue.broken or exc
        raise
    for callback in job.at_end:
        callback()
    if job.failure_detector is not None:
        job.failure_detector.stop()
    if job.monitor is not None:
        job.monitor.close()
    with within(job.timeout_s, "mpisgd.shutdown()"):
        if job.monitor is not None:
            job.monitor.free()
        if job.failure_detector is not None:
            job.failure_detector.free()
        for group in reversed(members):
            group.free() if group in ended else group.leave()
    job.groups.clear()
    if job.console is not None:
        job.console.close()
        return_freed_memory()
        changes.close()
    _remove_hooks(job)
    place.job, place.ended = None, job


def _remove_hooks(job: Job) -> None:
    """Give back to the process what `begin` has taken over."""
    for taken in (job.hooks, job.faults):
        if taken is not None:
            taken.remove()


def _at_exit() -> None:
    """End this process cleanly if all ranks are leaving, else the job. Registered with `atexit`."""
    job = PROCESS.job or PROCESS.ended
    if job is None or job.hooks is None or job.world.pid != os.getpid():
        return
    consistency.exit_code = job.hooks.exit_code()
    changes.pop_all()  # what ends needs nothing back, and frozen modules are not searched for garbage
    try:
        shutdown()  # unless the program has done so
    except MpisgdError as exc:  # MPI's own finalize would wait for ever for what is in flight
        job.hooks.fail(exc)
    heartbeat.stop()
    local_rank = job.world.known_topology.local_rank
    if local_rank == 0:
        config.note(config.LEFT_NOTE)
    if job.lost_host:
        exit_without_host(local_rank)
    if job.lost_ranks:
        if local_rank == 0:
            config.note(config.ENDED_NOTE)  # tells `python -m mpisgd run` that the job has succeeded
        exit_after_loss()
    elif job.world.size > 1:
        set_alarm(job.timeout_s)
