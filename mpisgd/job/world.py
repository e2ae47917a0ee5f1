"""`Job`: what `init()` sets up, and how it is made from a communicator."""

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpisgd import config, tracing
from mpisgd.accelerator.runtime import runtime
from mpisgd.core.group import Group
from mpisgd.core.topology import discover
from mpisgd.cores import available_cores
from mpisgd.errors import JobError
from mpisgd.job.excepthook import ExceptHook
from mpisgd.job.fault_report import FaultReport
from mpisgd.job.group_factory import make_group
from mpisgd.job.startup import load_mpi
from mpisgd.monitor.console import ConsoleLock
from mpisgd.monitor.failure_detector import FailureDetector, FaultTolerance
from mpisgd.monitor.state_collector import StateCollector
from mpisgd.monitor.watchdog import StallMonitor, Watchdog
from mpisgd.threads.waiting import set_oversubscribed
from mpisgd.transport.device.messages import DeviceMessages
from mpisgd.tuning.profile import find_costs

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpisgd.transport.mpi import Communicator

__all__ = ["Job", "make_job"]


@dataclass(eq=False)
class Job:
    """What `init()` has set up.

    Attributes:
        communicator: the ranks, by the communicator that all else was made of; elastic knows its own type.
        world: the group of all of them.
        timeout_s: how long operations wait.
        threads_allowed: whether MPI runs at THREAD_MULTIPLE.
        gpu: how tensors on GPUs travel, one of `config.GPU_CHOICES`.
        has_nccl: whether any rank has a GPU, and a torch with NCCL.
        pg_options: of NCCL, as the program has given them; the same on all ranks.
        comm: the user's communicator, None for MPI.COMM_WORLD.
        hooks: ends the job when an exception is not caught. None where the ranks are threads, as are the next
            three, which are the process's.
        console: held by the rank of a host that prints.
        monitor: tells what the other ranks are doing.
        faults: names the rank and its place where a process ends by a fault.
        failure_detector: notices the loss of a rank, where the job survives that and has several.
        fault_tolerance: what ends calls after a loss, where the job survives that.
        metrics: where they are served, None where nothing is measured; the same on all ranks.
        complaint: about the job's profile, to be told to the user; "" for none.
        groups: those that this rank is in and that are not closed, the world first.
        names: numbers of the groups without a name.
        before_end: called by all ranks in `shutdown()` while their groups can still be used.
        at_end: called by all ranks in `shutdown()`, once nothing is in flight any more.
        lost_ranks: whether ranks were lost before this world was made.
        lost_host: whether a host was, for which MPI's own finalize would wait.
        leaving: called where this rank ends by itself, as the others go on without it; [] where it does not.
        asked_for_end: whether this rank has asked the others to end `elastic.run`.
        make_next: makes the job of the ranks of another communicator, those that are left after a loss.
    """

    communicator: Any
    world: Group
    timeout_s: float
    threads_allowed: bool
    gpu: str
    has_nccl: bool = False
    pg_options: Any = None
    comm: "MPI.Intracomm | None" = None
    hooks: ExceptHook | None = None
    console: ConsoleLock | None = None
    monitor: StallMonitor | None = None
    faults: FaultReport | None = None
    failure_detector: FailureDetector | None = None
    fault_tolerance: FaultTolerance | None = None
    metrics: config.Endpoint | None = None
    complaint: str = ""
    groups: list[Group] = field(default_factory=list)
    names: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    before_end: list[Callable[[], None]] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    lost_ranks: bool = False
    lost_host: bool = False
    leaving: list[Callable[[], None]] = field(default_factory=list)
    asked_for_end: bool = False
    make_next: "Callable[[Any], Job] | None" = None

    def __post_init__(self) -> None:
        self.add(self.world)

    def add(self, group: Group) -> None:
        """Add a group. All members make groups of the same ranks in the same order."""
        group.job = self
        if group.rank < 0:
            return  # nothing is to be ended
        alike = [other.ordinal for other in self.groups if other.ranks == group.ranks]
        group.ordinal = max(alike, default=-1) + 1
        if self.has_nccl:
            group.point_to_point.elsewhere = DeviceMessages(group)
        self.groups.append(group)

    def end(self, exit_code: int) -> None:
        """End every process of the job. Does not return.

        Raises:
            JobError: the ranks are threads, which only whoever has started them can end.
        """
        if self.hooks is None:
            raise JobError("the job ends", exit_code)
        self.hooks.end_job(exit_code)


def make_job(communicator: "Communicator", comm: "MPI.Intracomm | None", timeout_s: float, gpu: str) -> Job:
    """Make the job of the ranks of `communicator`, which it owns from now on. Collective over them."""
    mpi = load_mpi()
    survives = mpi.thread_level() == "MULTIPLE" and mpi.survives_losses()
    fault_tolerance = mpi.MpiFaultTolerance() if survives else None
    detector = None
    if fault_tolerance is not None and communicator.size > 1:
        detector = FailureDetector(communicator, fault_tolerance)
    try:
        job = _make_with(detector, communicator, comm, timeout_s, gpu)
    except BaseException:
        if detector is not None:
            detector.stop()
        raise
    job.fault_tolerance = fault_tolerance
    job.make_next = functools.partial(make_job, comm=comm, timeout_s=timeout_s, gpu=gpu)
    return job


def _make_with(
    detector: FailureDetector | None,
    communicator: "Communicator",
    comm: "MPI.Intracomm | None",
    timeout_s: float,
    gpu: str,
) -> Job:
    threads_allowed = load_mpi().thread_level() == "MULTIPLE"
    abort = communicator.abort if detector is None else detector.abort
    topology = discover(communicator)
    set_oversubscribed(topology.local_size > available_cores())
    costs, complaint = find_costs(communicator, topology.ranks_per_host)
    world = make_group(
        "world",
        range(communicator.size),
        communicator,
        timeout_s=timeout_s,
        threads_allowed=threads_allowed,
        topology=topology,
        costs=costs,
    )
    # By the first rank's wish: not every launcher hands it to all, and a joiner has none of its own.
    wanted = tracing.metrics or config.metrics()
    told = communicator.all_gather_object((runtime().is_available() and runtime().has_nccl(), wanted))
    has_nccl = any(nccl for nccl, _ in told)
    job = Job(communicator, world, timeout_s, threads_allowed, gpu, has_nccl, comm=comm)
    job.failure_detector, job.complaint = detector, complaint
    job.metrics = next((endpoint for _, endpoint in told if endpoint is not None), None)
    job.console = console = ConsoleLock(communicator)
    # The queue is of no use to `hooks` once the world is closed, its counter is.
    consistency = world.queue.consistency
    job.hooks = ExceptHook(communicator, topology, console, abort, lambda: consistency.number)
    job.hooks.leaving = job.leaving
    job.faults = FaultReport(communicator.rank, communicator.size, topology.hostnames[topology.node_rank])
    collector = StateCollector(communicator, topology, job.groups, threads_allowed=threads_allowed)
    watchdog = Watchdog(
        collector,
        console,
        timeout_s=timeout_s,
        warning_s=config.stall_warning_s(),
        abort=functools.partial(_abort_from_thread, abort if threads_allowed else None),
        end_rank=functools.partial(_abort_from_thread, None),
        revoke=None if detector is None else detector.revoke,
    )
    job.monitor = StallMonitor(collector, watchdog)
    job.faults.install()
    if detector is not None:
        here = [collector.processes[rank] for rank in topology.nodes[topology.node_rank]]
        detector.enable_abort(here, topology.local_rank)
    return job


def _abort_from_thread(abort: Callable[[int], None] | None, reason: str) -> None:
    """End the job while the main thread is blocked inside MPI. Does not return.

    Args:
        abort: ends all ranks; None where only the main thread may call MPI, or there is no launcher.
        reason: has been printed before.
    """
    tracing.flush()
    if abort is not None:
        abort(1)
    os._exit(1)  # the launcher ends the others when it sees that
